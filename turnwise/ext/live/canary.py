"""The canary: some sessions are served by the last approved weights, against which newer ones are approved or undone.

What is decided is in the state of checkpoints; the approved weights stand beside them, in ``approved/`` of a run.
"""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import asdict
from statistics import variance
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from turnwise.errors import TrainError
from turnwise.ext.live.arms import APPROVED, CANDIDATE, STATE, CanaryConfig, CanaryState
from turnwise.ext.live.sequential_test import ArmRewards, difference_interval
from turnwise.recorder.ledger import LedgerWriter
from turnwise.trainer.learn.distill import Teacher
from turnwise.trainer.loops.steps import Batch, TrainedBatch, learn
from turnwise.trainer.run.checkpoint import CheckpointStore, load_state
from turnwise.trainer.run.policies import CRITIC, LoadedPolicy, TrainedPolicy, sync_weights
from turnwise.trajectory import to_samples

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun

_MOST_LOG_RATIO: Final = 20.0


class Canary:
    """Approves and undoes the weights of a live run.

    Attributes:
        policy: The approved weights with their servers; its learner is the run's.
        state: What has been decided.
    """

    def __init__(self, run: TrainRun, config: CanaryConfig, live: dict[str, Any], policy: TrainedPolicy) -> None:
        self.policy = policy
        self._run, self._live = run, live
        self._config = config
        self._store = CheckpointStore(run.directory / APPROVED)
        self._went_back = False

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(
        cls, run: TrainRun, config: CanaryConfig, live: dict[str, Any], ledger: LedgerWriter
    ) -> AsyncIterator[Self]:
        """Serve the approved weights in the context; the first ones are evaluated. ``live`` is the checkpointed state.

        Raises:
            CheckpointError: The approved weights are missing or damaged.
            InferenceError: A server fails.
            TrainError: Every held-out episode failed.
        """
        trained = run.policy
        loaded = LoadedPolicy(APPROVED, trained.config, trained.renderer, trained.learner, None, None)
        async with contextlib.AsyncExitStack() as stack:
            [policy] = await TrainedPolicy.serve([loaded], run.directory / "logs" / APPROVED, ledger, stack)
            canary = cls(run, config, live, policy)
            await canary._resume()
            yield canary

    async def _resume(self) -> None:
        """Send the approved weights to their servers; without any, those of now are the first."""
        run, step = self._run, self._run.state.step
        if "canary" not in self._live:
            held_out = await self._evaluate(f"approved-{step}")
            if math.isnan(held_out[0]):
                raise TrainError("eval: every held-out episode failed, and nothing is approved without an evaluation")
            self.state = CanaryState(step, step, held_out, copy.deepcopy(self._live["baselines"]))
            await self._keep()
            self._live["canary"] = asdict(self.state)
        self.state = CanaryState.of(self._live["canary"])
        await self._load(self.state.approved)
        await self._publish()
        if self.state.approved != step:
            path = run.store.path(step)
            await run.train_thread(lambda: self.policy.learner.load(path))

    async def learn(self, batch: Batch) -> TrainedBatch:
        """Learn from a batch, or go back to the approved weights instead; before that newer ones may be approved.

        Raises:
            InferenceError: A server died more often than ``inference.max_restarts``.
        """
        state, tolerance = self.state, self._config.tolerance
        state.count([trajectory for group in batch.groups for trajectory in group.trajectories])
        candidate, approved = state.arms[CANDIDATE], state.arms[APPROVED]
        interval = difference_interval(candidate, approved)
        kl = await self._estimate_kl(batch)
        figures = {"live/kl": kl, "live/approved_step": float(state.approved)}
        if interval is not None:
            names = "live/difference", "live/difference_low", "live/difference_high"
            figures |= zip(names, (candidate.mean - approved.mean, *interval), strict=True)
        batch.metrics.update({name: value for name, value in figures.items() if value is not None})
        exceeded = kl is not None and self._config.kl_budget is not None and kl > self._config.kl_budget
        why = f"KL {kl:.3f} is above {self._config.kl_budget}" if exceeded else describe_arms(candidate, approved)
        if interval is not None and interval[1] < 0:
            return await self._roll_back(batch, why)
        if exceeded or (interval is not None and interval[0] > -tolerance and candidate.count >= state.evaluate_at):
            mean, error = held_out = await self._evaluate(f"candidate-{self._run.state.step}")
            loss = state.held_out[0] - mean
            why = f"{why}; held-out reward {mean:.3f} against {state.held_out[0]:.3f}"
            if loss <= tolerance:
                await self._promote(held_out, why)
            elif exceeded or loss > math.hypot(error, state.held_out[1]):
                return await self._roll_back(batch, why)
            else:
                state.evaluate_at = 2 * candidate.count
        return await learn(self._run, batch)

    async def settle(self) -> None:
        """Put what a step decided into the state of its checkpoint; one that went back is written at once."""
        run, state, step = self._run, self.state, self._run.state.step
        if self._went_back:
            learned: dict[str, int] = self._live["sessions"]
            undone = dict.fromkeys((name for name, number in learned.items() if number > state.approved), step)
            self._live["undone"] = undone | self.undone
            self._live["baselines"] = copy.deepcopy(state.baselines)
            state.restart(step)
        self._live["canary"] = asdict(state)
        if self._went_back:
            # Before a server has weights of this number, by which sessions are counted.
            await run.save()
            await self._publish()
            self._went_back = False

    @property
    def undone(self) -> dict[str, int]:
        """The step that went back behind what was learned from a session, by its id."""
        undone: dict[str, int] = self._live.get("undone", {})
        return undone

    def counts(self) -> dict[str, Any]:
        """Return decisions so far, and the number of sessions in the test by arm."""
        state = self.state
        decisions = {"approved_step": state.approved, "promotions": state.promotions, "rollbacks": state.rollbacks}
        return {**decisions, "arms": {name: arm.count for name, arm in state.arms.items()}}

    async def _promote(self, held_out: tuple[float, float], why: str) -> None:
        """Approve the weights of now."""
        run, state = self._run, self.state
        state.approved, state.held_out = run.state.step, held_out
        state.baselines = copy.deepcopy(self._live["baselines"])
        state.promotions += 1
        state.restart(run.state.step)
        await self._keep()
        self._live["canary"] = asdict(state)
        await run.save()
        await self._publish()
        self._report(f"approved step {run.state.step}: {why}")

    async def _roll_back(self, batch: Batch, why: str) -> TrainedBatch:
        """Load the approved weights as those of the next step, which learns nothing."""
        run, state = self._run, self.state
        step = run.state.step + 1
        await self._load(state.approved)
        run.batches.roll_back(step, state.approved)
        state.rollbacks += 1
        self._went_back = True
        self._report(f"step {step} went back to step {state.approved}: {why}")
        metrics = batch.metrics | {"live/rolled_back_to": float(state.approved)}
        return TrainedBatch(batch, metrics, {}, time.monotonic(), 0.0)

    async def _load(self, step: int) -> None:
        """Load the learner of an approved step, with all that it learns by."""
        run, path = self._run, self._store.path(step)
        saved = load_state(path)
        policy = run.policy

        def load() -> None:
            policy.learner.load(path)
            if policy.critic is not None:
                policy.critic.learner.load(path / CRITIC)
            if policy.kl is not None:
                policy.kl.coef = saved.kl_coefs[policy.name]

        with run.updating() as changing:
            changing()
            await run.train_thread(load)

    async def _keep(self) -> None:
        """Write the weights of now as approved, and remove those that no checkpoint names any more."""
        run, store = self._run, self._store
        state = copy.deepcopy(run.state)
        await run.train_thread(lambda: store.save(state, run.policy.save))
        saved = [load_state(run.store.path(step), contents=False) for step in run.store.steps()]
        named = {state.tasks.get(STATE, {}).get("canary", {}).get("approved") for state in saved}
        for step in set(store.steps()) - named - {run.state.step, self.state.approved}:
            shutil.rmtree(store.path(step), ignore_errors=True)

    async def _publish(self) -> None:
        await sync_weights([self.policy], self.state.since)

    async def _evaluate(self, label: str) -> tuple[float, float]:
        """Return the mean reward on held-out tasks with the standard error of its sampling: the tasks are the same."""
        result = await self._run.evaluate(label)
        summary = None if result is None else result.sampled or result.greedy
        if summary is None or not summary.reward.episodes:
            return math.nan, 0.0
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for row in summary.rows:
            if row.error is None:
                rewards[row.task_id].append(row.reward)
        noise = math.fsum(variance(values) * len(values) for values in rewards.values() if len(values) > 1)
        return summary.reward.mean, math.sqrt(noise) / summary.reward.episodes

    async def _estimate_kl(self, batch: Batch) -> float | None:
        """Return the mean KL of sampled tokens from the approved weights; None without tokens of newer ones.

        The estimator ``r - 1 - log r``, with ``r = p_approved / p_sampled`` (Schulman 2020, Approximating KL
        Divergence, k3).
        """
        if self._config.kl_budget is None:
            return None
        complete = [trajectory for trajectory in batch.trajectories() if trajectory.error is None]
        rows = [row for trajectory in complete for row in to_samples(trajectory).rows if not row.media]
        scores = await Teacher(await self.policy.served(), self.policy.fleet.recover).score(rows)
        ratios = []
        for row, scored in zip(rows, scores, strict=True):
            newer = row.loss_mask & (row.weight_versions > self.state.since) & np.isfinite(scored)
            ratios.append((scored - row.rollout_logprobs)[newer])
        log_ratio = np.clip(np.concatenate([np.zeros(0), *ratios]), -_MOST_LOG_RATIO, _MOST_LOG_RATIO)
        return float(np.mean(np.expm1(log_ratio) - log_ratio)) if len(log_ratio) else None

    def _report(self, text: str) -> None:
        self._run.display.say(f"{self._run.config.name} canary: {text}")


def describe_arms(candidate: ArmRewards, approved: ArmRewards) -> str:
    """Return the figures of both arms in words."""
    return (
        f"mean reward {candidate.mean:.3f} of {candidate.count} sessions, against {approved.mean:.3f} of "
        f"{approved.count} by the approved weights"
    )
