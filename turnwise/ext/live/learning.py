"""Learning from sessions: REINFORCE with a running baseline for each type of task, while users are served."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic import PositiveFloat
from torch import Tensor

from turnwise.errors import ConfigError
from turnwise.ext.live.arms import STATE, is_session
from turnwise.ext.live.canary import Canary
from turnwise.ext.live.feedback import FeedbackLog
from turnwise.ext.live.service import LiveConfig, LiveService
from turnwise.ext.live.sessions import replay_request, session_request
from turnwise.recorder.ledger import LEDGERS, LedgerWriter
from turnwise.trainer.algorithms.advantages import Advantages, Groups
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.steps import Batch, finish_step, learn, publish, roll_out

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun

HORIZON: Final = 100
"""Sessions over which a baseline is a mean; of more, the earlier ones fade."""


def reinforce(rewards: Tensor, groups: Tensor) -> Advantages:
    """Advantages of rewards from which a baseline has been subtracted: ``A_i = r_i``.

    Williams 1992, Simple statistical gradient-following algorithms (REINFORCE). Nothing is compared: a group has a
    gradient unless all its rewards are 0.

    Raises:
        TrainError: Shapes differ, or a reward is not finite.
    """
    grouped = Groups.of(rewards, groups)
    size = torch.zeros_like(grouped.mean).index_add(0, grouped.index, grouped.rewards.abs())
    return grouped.result(grouped.rewards, size == 0)


def kto(
    rewards: Tensor,
    groups: Tensor,
    *,
    components: Mapping[str, Tensor],
    beta: PositiveFloat = 0.1,
    desirable: PositiveFloat = 1.0,
    undesirable: PositiveFloat = 1.0,
) -> Advantages:
    """Advantages by which the policy gradient is that of KTO: thumbs up and down, which nothing is compared with.

    Ethayarajh et al. 2024, KTO (arXiv:2402.01306), section 4.1. With ``r = log p(y|x) - log p_ref(y|x)``, s the
    logistic function and ``z = KL(p || p_ref)`` a constant, the loss of a desirable y is ``w (1 - s(beta (r - z)))``,
    and that of another ``w (1 - s(beta (z - r)))``. The gradient is ``-A grad log p(y|x)`` with ``A_i = +-w beta s(u_i)
    (1 - s(u_i))``, ``u = beta (r - z)``: where the policy has not moved yet, that of the policy loss with the
    aggregation ``trajectory_sum``.

    ``beta r`` is what ``algorithm.kl`` subtracts (``where: reward``, ``estimator: k1``, ``coef`` beta); without it the
    reference is the policy that sampled, r = 0. The policy sampled every y, so that ``z = max(0, mean r)``; the paper,
    whose y are data, estimates it from mismatched pairs.
    What is desirable has a positive sum of ``components`` without ``kl``, and the weight ``desirable``.
    """
    grouped = Groups.of(rewards, groups)
    zero = torch.zeros_like(grouped.rewards)
    label = sum((scores for name, scores in components.items() if name != "kl"), zero).sign()
    scaled = -components.get("kl", zero)
    value = (scaled - scaled.mean().clamp(min=0.0)).sigmoid()
    weight = torch.where(label > 0, desirable, undesirable)
    labelled = torch.zeros_like(grouped.mean).index_add(0, grouped.index, label.abs())
    return grouped.result(label * weight * beta * value * (1 - value), labelled == 0)


KTO: Final = f"{kto.__module__}:{kto.__qualname__}"
NEUTRAL: Final = 0.5
"""What KTO takes for neither desirable nor undesirable: a session's mean score between the thumbs."""


def update_baselines(
    baselines: Mapping[str, Sequence[float]], rewards: Sequence[tuple[str, float]]
) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """Return the baseline of each reward, and the baselines after all of them.

    The baseline of a task type is the mean reward of its earlier sessions, ``b <- b + (r - b) / min(n, HORIZON)``; in
    its first batch, that batch's mean.

    Args:
        baselines: Mean and number of rewards by task type.
        rewards: Task type and reward of each session, in order.
    """
    by_type: defaultdict[str, list[float]] = defaultdict(list)
    for task_type, reward in rewards:
        by_type[task_type].append(reward)
    updated = {task_type: (mean, count) for task_type, (mean, count) in baselines.items()}
    for task_type, values in by_type.items():
        mean, count = updated.get(task_type, (0.0, 0))
        for value in values:
            count += 1
            mean += (value - mean) / min(count, HORIZON)
        updated[task_type] = mean, count
    first = {name: sum(values) / len(values) for name, values in by_type.items()}
    return [baselines[name][0] if name in baselines else first[name] for name, _ in rewards], updated


def check_live(config: TrainConfig) -> LiveConfig:
    """Return the section ``custom.live``. Raises ConfigError if the configuration cannot learn from use."""
    if len(config.policies) > 1:
        raise ConfigError(f"policies are {', '.join(config.policies)}: users are served by one; remove the others")
    if config.rollout.group_size > 1:
        raise ConfigError(f"rollout.group_size is {config.rollout.group_size}: a session is a group of one; remove it")
    if config.replay.strategy is None or config.replay.strategy.name != "fifo" or config.replay.filter_groups:
        raise ConfigError("replay drops or waits, but feedback may come days later: set replay.strategy to fifo only")
    if config.mode != "sync":
        raise ConfigError(f"mode is {config.mode}: set sync; users are served during updates in any case")
    kl, beta = config.algorithm.kl, config.algorithm.advantage_options.get("beta", 0.1)
    is_reference = kl is None or (kl.where, kl.estimator, kl.coef, kl.target) == ("reward", "k1", beta, None)
    if config.algorithm.advantage == KTO and not is_reference:
        raise ConfigError(
            f"algorithm.kl is no reference of KTO: set where to reward, estimator to k1, coef to {beta:g} (the beta of "
            "algorithm.advantage_options) and no target; or remove it"
        )
    live = LiveConfig.of(config)
    if live.canary is not None:
        live.canary.check(config)
    return live


async def serve_and_learn(run: TrainRun) -> None:
    """Serve users, and train a step whenever ``batch.groups`` ended sessions have feedback.

    Raises:
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    state: dict[str, Any] = run.state.tasks.get(STATE, {"sessions": {}, "baselines": {}})
    run.state.tasks = {**run.state.tasks, STATE: state}
    live, canary = check_live(run.config), None
    async with contextlib.AsyncExitStack() as stack:
        ledger = LedgerWriter(run.directory / LEDGERS / "live.jsonl")
        stack.push(ledger.leave)
        if live.canary is not None:
            canary = await stack.enter_async_context(Canary.serving(run, live.canary, state, ledger))
        serving = LiveService.listening(run, live, state["sessions"], ledger, canary)
        service = await stack.enter_async_context(serving)
        run.display.say(f"serving users at {service.url}")
        while not run.ended:
            sessions = await service.next_sessions(run.config.batch.groups)
            # Sessions are complete in the journal, and not rolled out; what was consumed is not there any more.
            requests = [session_request(session) for session in sessions]
            if live.group_size is not None:
                rows = service.feedback.tasks
                replayed = [session for session in sessions if session in rows]
                requests += [replay_request(session, rows[session], live.group_size) for session in replayed]
            batch = await roll_out(run, requests)
            baselines = credit_sessions(
                batch, service.feedback, state["baselines"], unpaired=run.config.algorithm.advantage == KTO
            )
            learned = await (learn(run, batch) if canary is None else canary.learn(batch))
            for gaps in learned.gaps.values():
                # Diagnostics would quote what users wrote.
                gaps.largest.clear()
            run.advance()
            run.state.tasks = {**run.state.tasks, STATE: state}
            learned_from = (item.id if is_session(item) else item.task_id for item in batch.trajectories())
            state["sessions"] |= dict.fromkeys(learned_from, run.state.step)
            state["baselines"] = baselines
            if canary is not None:
                await canary.settle()
            await run.train_thread(service.feedback.sync)
            async with service.swapping():
                await publish(run, [learned])
            await finish_step(run)


def credit_sessions(
    batch: Batch, feedback: FeedbackLog, baselines: Mapping[str, Sequence[float]], *, unpaired: bool = False
) -> dict[str, tuple[float, float]]:
    """Give the trajectories of a batch their feedback less the baseline; return the baselines after it.

    What has no score, but a correction, learns from its teacher alone. Of ``unpaired`` sessions each score is compared
    with :data:`NEUTRAL`. Episodes sampled from a task keep their rewards; their baseline is their group's mean.
    """
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    for trajectory in filter(is_session, trajectories):
        turns = [segment.turn_id for segment in trajectory.segments if segment.sampled]
        scores = feedback.scores(trajectory.id)
        trajectory.rewards = [(None if turn is None else turns[turn], source, value) for turn, source, value in scores]
    trajectories = [item for item in trajectories if item.rewards and not item.frozen and item.error is None]
    compared = [item.task_id if is_session(item) else item.group_id for item in trajectories]
    rewards = [(name, trajectory.reward) for name, trajectory in zip(compared, trajectories, strict=True)]
    subtracted, updated = update_baselines(baselines, rewards)
    for trajectory, baseline in zip(trajectories, subtracted, strict=True):
        neutral = NEUTRAL * len(trajectory.rewards)
        is_neutral = unpaired and is_session(trajectory)
        trajectory.rewards.append((None, "baseline", -neutral if is_neutral else -baseline))
    replayed = {trajectory.group_id for trajectory in trajectories if not is_session(trajectory)}
    return {name: baseline for name, baseline in updated.items() if name not in replayed}
