"""Bisection of an episode: the turn up to which it could still be won, found by continuations from each of its turns.

The recorded episode is played again up to every turn; from there the model continues it, several times. How often that
succeeds is what the turns before it were worth: where it drops, the episode was lost.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table
from rich.text import Text

from turnwise.errors import ConfigError, FormatError, ReplayError
from turnwise.evaluation.directory import success_rule
from turnwise.evaluation.runner import open_model
from turnwise.ext.checks.recorded import RecordedRun
from turnwise.ext.checks.replay import RecordedClient, spec_of
from turnwise.inference.config import InferenceConfig
from turnwise.model.core import LLMClient
from turnwise.rollout.branching.tree import TreeConfig
from turnwise.rollout.runner import EpisodeRunner
from turnwise.seeding import stable_hash
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory
from turnwise.types import WHY_UNFORKED

_TEXT_LENGTH = 60
# As in evaluations: a sum of parts may miss the reward of a success by its rounding.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class TurnOdds:
    """What became of an episode when one of its turns was sampled again.

    Attributes:
        session: The turn's session.
        turn_id: The turn.
        text: The text and calls of the recorded turn, shortened.
        rewards: Rewards of the continuations that began before it.
    """

    session: str
    turn_id: str
    text: str
    rewards: tuple[float, ...]

    def success(self, success_reward: float) -> float:
        """Return the share of continuations whose reward is at least this; NaN without any."""
        won = sum(reward >= success_reward - _TOLERANCE for reward in self.rewards)
        return won / len(self.rewards) if self.rewards else math.nan


@dataclass(frozen=True, slots=True)
class Bisection:
    """The result of a bisection.

    Attributes:
        episode_id: The episode.
        task_id: Its task.
        reward: Its recorded reward.
        success_reward: Least reward of a success.
        turns: Its turns in order.
        failed: Continuations that ended in an error; they count for nothing.
    """

    episode_id: str
    task_id: str
    reward: float
    success_reward: float
    turns: list[TurnOdds] = field(default_factory=list)
    failed: int = 0

    @property
    def odds(self) -> list[float]:
        """Success before each turn, then that of the recorded episode."""
        return [
            *(turn.success(self.success_reward) for turn in self.turns),
            float(self.reward >= self.success_reward - _TOLERANCE),
        ]

    @property
    def decisive(self) -> int | None:
        """Index of the turn with the largest change towards the episode's end; None where no turn changed it."""
        odds = self.odds
        sign = 1.0 if odds[-1] else -1.0
        steps = [(sign * (later - earlier), -index) for index, (earlier, later) in enumerate(pairwise(odds))]
        best = max((step for step in steps if not math.isnan(step[0])), default=(0.0, 0))
        return -best[1] if best[0] > 0 else None

    def verdict(self) -> str:
        """Return in one sentence what the continuations say."""
        won = "was won" if self.odds[-1] else "was lost"
        decisive = self.decisive
        if decisive is None:
            always = "always" if self.odds[-1] else "never"
            return f"The episode {won}, and from every turn its continuations {always} succeed: no turn decided it."
        earlier, later = self.odds[decisive], self.odds[decisive + 1]
        is_last = decisive + 1 == len(self.turns)
        then = "with it the episode ended" if is_last else f"after it {later:.0%}"
        sentence = (
            f"The episode {won} at turn {decisive}: before it {earlier:.0%} of the continuations succeed, {then}."
        )
        if is_last or self._is_certain(decisive):
            return sentence
        return f"{sentence} So few may differ by chance: take more (--samples)."

    def _is_certain(self, index: int) -> bool:
        """Whether success differs before and after a turn by more than two standard errors of the difference."""
        counts = [len(turn.rewards) for turn in self.turns[index : index + 2]]
        rates = self.odds[index : index + 2]
        pooled = sum(rate * count for rate, count in zip(rates, counts, strict=True)) / sum(counts)
        error = math.sqrt(pooled * (1 - pooled) * sum(1 / count for count in counts))
        return abs(rates[1] - rates[0]) > 2 * error

    def table(self) -> Table:
        """Return the turns with the success of their continuations."""
        table = Table("turn", "success from here", "mean reward", "what was said then", box=None, pad_edge=False)
        for index, turn in enumerate(self.turns):
            rate, count = turn.success(self.success_reward), len(turn.rewards)
            success = "-" if not count else f"{round(rate * count)} of {count}"
            mean = "-" if not count else f"{math.fsum(turn.rewards) / count:.3f}"
            style = "bold" if index == self.decisive else ""
            table.add_row(str(index), success, mean, Text(turn.text), style=style)
        table.add_row("end", "1" if self.odds[-1] else "0", f"{self.reward:.3f}", "")
        return table

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "episode_id": self.episode_id, "task_id": self.task_id, "reward": self.reward, "decisive": self.decisive,
            "failed": self.failed, "verdict": self.verdict(),
            "turns": [
                {"session": turn.session, "turn_id": turn.turn_id, "said": turn.text, "rewards": list(turn.rewards)}
                for turn in self.turns
            ],
        }  # fmt: skip


async def bisect(
    run: RecordedRun,
    members: Sequence[Trajectory],
    tasks: Mapping[str, Task],
    client: LLMClient,
    *,
    samples: int = 4,
    success_reward: float = 1.0,
    seed: int = 0,
) -> Bisection:
    """Continue an episode from each of its turns.

    Args:
        run: Its run, whose environment, agent and limits it is played with.
        members: Its trajectories.
        tasks: Those of the run, by id.
        client: The model that continues it.
        samples: Continuations from each turn.
        success_reward: Least reward of a success.
        seed: Of their sampling.

    Raises:
        ReplayError: The episode plays out differently today, or nothing can be forked.
        FormatError: Its task is unknown, or nothing was sampled in it.
        ConfigError: Environment or agent cannot be made or forked.
    """
    first = members[0]
    turns = [(member, turn) for member in members for turn in member.turns()]
    if first.task_id not in tasks or not turns:
        what = f"its task {first.task_id!r} is not among those of the run" if turns else "nothing was sampled in it"
        raise FormatError(f"episode {first.episode_id}: {what}")
    tree = TreeConfig(branches=samples * len(turns), where="every_turn")
    config = run.rollout.model_copy(update={"tree": tree})
    info = await client.model_info()
    spec = spec_of(first, tasks)
    with ThreadPoolExecutor(max_workers=max(1, min(config.concurrency, 64))) as executor:
        runner = EpisodeRunner(
            config, RecordedClient(members, client), run.renderer,
            context_length=min(info.context_length, run.context_length), executor=executor, policy=run.policy,
        )  # fmt: skip
        try:
            await runner.prepare()
            outcome = await runner.run(replace(spec, partition="train", sampling_seed=stable_hash("bisect", seed)))
        finally:
            await runner.close()
    if outcome.error is not None:
        raise ReplayError(f"episode {first.episode_id} cannot be played again: {outcome.error}") from outcome.error
    return _result(members, outcome.trajectories, success_reward)


def _result(members: Sequence[Trajectory], played: Sequence[Trajectory], success_reward: float) -> Bisection:
    first = members[0]
    first_branches = [branch for trajectory in played for branch in trajectory.branches[:1]]
    if not first_branches:
        note = played[0].turn_notes.get("", {}).get(WHY_UNFORKED, "no turn could be forked")
        raise ReplayError(f"episode {first.episode_id}: nothing was continued: {note}")
    by_branch = zip(*(trajectory.returns() for trajectory in played), strict=True)
    rewards = [math.fsum(session_rewards) for session_rewards in by_branch]
    continued: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for trajectory in played:
        for branch, reward in zip(trajectory.branches, rewards, strict=True):
            if branch.again is not None:
                continued[trajectory.agent, branch.again].append(reward)
    reward = math.fsum(member.reward for member in members)
    if not math.isclose(rewards[0], reward, rel_tol=1e-9, abs_tol=1e-12):
        raise ReplayError(
            f"episode {first.episode_id} had the reward {reward:g} and has {rewards[0]:g} when it is played again: its "
            "environment does not repeat itself (turnwise replay names the first difference)"
        )
    turns = [
        TurnOdds(
            member.agent, turn.turn_id, _turn_text(turn.sampled.messages), tuple(continued[member.agent, turn.turn_id])
        )
        for member in members
        for turn in member.turns()
    ]
    failed = int(played[0].metrics.get("tree/failures", 0))
    return Bisection(first.episode_id, first.task_id, reward, success_reward, turns, failed)


def _turn_text(messages: Sequence[Mapping[str, Any]]) -> str:
    message = messages[0] if messages else {}
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    words = " ".join([str(message.get("content") or ""), *calls]).split()
    line = " ".join(words)
    return line if len(line) <= _TEXT_LENGTH else f"{line[: _TEXT_LENGTH - 3]}..."


@dataclass(frozen=True, slots=True)
class BisectSettings:
    """Settings of :func:`run_bisect`.

    Attributes:
        source: Directory of a run or an evaluation.
        episode: Id of an episode, or of one of its trajectories.
        model: Directory of the model that continues it; None is the evaluation's.
        urls: Running servers of it; none serves it here.
        samples: Continuations from each turn.
        temperature: Of their sampling; None is the run's.
        success_reward: Least reward of a success; None is the run's, else 1.
        seed: Of their sampling.
    """

    source: Path
    episode: str
    model: Path | None = None
    urls: tuple[str, ...] = ()
    samples: int = 4
    temperature: float | None = None
    success_reward: float | None = None
    seed: int = 0


def sessions_of_one_branch(members: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the sessions of an episode. Raises FormatError if they are of several branches."""
    branches: dict[str, list[Trajectory]] = {}
    for member in members:
        branches.setdefault(member.episode_id, []).append(member)
    if len(branches) == 1:
        return list(members)
    rewards = {name: math.fsum(session.reward for session in sessions) for name, sessions in branches.items()}
    raise FormatError(
        f"the episode was forked into {len(branches)} branches: name one of "
        f"{', '.join(f'{name} (reward {reward:g})' for name, reward in rewards.items())}"
    )


def chosen_model(settings: BisectSettings, run: RecordedRun) -> Path:
    """Return the model that continues the episode. Raises ConfigError if neither settings nor run name one."""
    model = settings.model or run.config.get("model")
    if model is None:
        checkpoints = sorted((run.path.parent / "checkpoints").glob("step_*/config.json"))
        newest = checkpoints[-1].parent if checkpoints else run.path.parent / "checkpoints/step_NNNNNN"
        raise ConfigError(
            f"{settings.source} is a training run: name the model that continues it with --model, such as {newest}"
        )
    if not settings.urls and not (Path(model) / "config.json").is_file():
        raise ConfigError(
            f"the model to continue with is {model}, which holds no config.json: name a model's directory with "
            "--model, or a running server with --url"
        )
    return Path(model)


def run_bisect(settings: BisectSettings) -> Bisection:
    """Bisect an episode of a directory.

    Raises:
        ConfigError: The model is not named, or the run cannot be read.
        FormatError: There is no such episode.
        ReplayError: It cannot be played again.
        InferenceError: The model cannot be served.
    """
    run = RecordedRun.load(settings.source)
    members = sessions_of_one_branch(run.episodes(episode=settings.episode))
    model = chosen_model(settings, run)
    if settings.temperature is not None:
        if not (math.isfinite(settings.temperature) and settings.temperature >= 0):
            raise ConfigError(f"--temperature is {settings.temperature}: it must be 0 (greedy) or more")
        rollout = run.rollout.model_copy(update={"temperature": settings.temperature})
        run = replace(run, rollout=rollout)
    if run.renderers:
        raise ConfigError(
            f"{settings.source} has the policies {', '.join([run.policy, *run.renderers])}: an episode of several "
            "policies is not bisected"
        )
    success_reward = success_rule(settings.source)[0] if settings.success_reward is None else settings.success_reward

    async def run_continuations() -> Bisection:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="turnwise-bisect-")))
            served = InferenceConfig.model_validate(run.config.get("inference") or {})
            served_model = await open_model(served, model, settings.urls, folder, stack)
            stack.push_async_callback(served_model.client.close)
            return await bisect(
                run, members, await run.tasks(), served_model.client, samples=settings.samples,
                success_reward=success_reward, seed=settings.seed,
            )  # fmt: skip

    return asyncio.run(run_continuations())
