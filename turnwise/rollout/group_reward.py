"""Group rewards: what a trajectory is worth beside the others of its group.

Trajectories are written when their group is complete, so that what stands on disk holds its rewards. What a
cancellation or a failure leaves of a group is written as it is, with an error; at the end of a run, what its journal
keeps for the next process is left to that.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from turnwise.agents.roles import TRAINED
from turnwise.envs.core import Env
from turnwise.envs.results import finite, named_numbers
from turnwise.envs.rewards.core import call_function, is_async
from turnwise.envs.rewards.loading import describe, load_function
from turnwise.errors import ConfigError, EnvError, shown
from turnwise.model.canonical import clean
from turnwise.rollout.config import GroupRewardConfig
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

Write = Callable[[Trajectory], None]


class GroupRewarder:
    """Rewards groups by one function, any number of them at the same time."""

    def __init__(
        self, config: GroupRewardConfig, *, write: Write | None, save_messages: bool, executor: Executor | None
    ) -> None:
        """Load the function.

        Args:
            config: Which one, and how long it may take.
            write: Called with every trajectory, once it will not change any more.
            save_messages: Whether trajectories keep their messages when the function has seen them.
            executor: Where a plain function runs.

        Raises:
            ConfigError: It cannot be loaded, or does not take ``(task, trajectories)``.
        """
        where = "rollout.group_reward"
        self._function = load_function(config.function, config.arguments, where)
        try:
            inspect.signature(self._function).bind(None, [])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}: {describe(self._function)} cannot be called as f(task, trajectories): {error}"
            ) from error
        self._config = config
        self._label = f"group reward {describe(self._function)}"
        self._write = write
        self._save_messages = save_messages
        # An environment of no episode, which lends its threads.
        self._lender = Env()
        self._lender.executor = executor
        self._held: defaultdict[str, list[Trajectory]] = defaultdict(list)
        self._kept: defaultdict[str, list[Trajectory]] = defaultdict(list)

    def take(self, trajectory: Trajectory) -> None:
        """Take what an episode left, to be written with its group; one that failed is written at once."""
        if trajectory.error is not None or trajectory.stop_reason in (StopReason.ERROR, StopReason.CANCELLED):
            self._put(trajectory)
        else:
            self._held[trajectory.episode_id.rpartition("/")[0]].append(trajectory)

    def keep(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Learn that a journal has these trajectories as they are, whether they were taken or an earlier process left
        them.

        Args:
            name: What the episode ids of their group begin with in this process.
            trajectories: What a member left.
        """
        ids = {each.id for each in trajectories}
        self._held[name] = [each for each in self._held[name] if each.id not in ids]
        self._kept[name] += trajectories

    async def reward(self, task: Task, group: TrajectoryGroup, name: str) -> TrajectoryGroup:
        """Note what the function says of the members' main trajectories, and write the group.

        Where an episode has no main session, the function is called for each role's trajectories that are compared
        with each other.

        Args:
            task: The group's.
            group: The group.
            name: What the episode ids of its group begin with in this process.

        Returns:
            The group; without trajectories, all of them failed, where the function failed.
        """
        skipped = group.partition == "val" and not self._config.in_evaluation
        for members in _compared(group.trajectories) if not skipped else ():
            began = time.monotonic()
            try:
                values = await self._values(task, members)
            except EnvError as error:
                self.abandon(name, f"{type(error).__name__}: {error}", StopReason.ERROR)
                episodes = {each.episode_id for each in group.trajectories}
                return replace(group, trajectories=[], failed=group.failed + len(episodes))
            for member, named in zip(members, values, strict=True):
                self._note(member, named)
                member.metrics["group/seconds"] = time.monotonic() - began
        for trajectory in (*self._kept.pop(name, ()), *self._held.pop(name, ())):
            self._put(trajectory)
        return group

    def abandon(self, name: str, error: str, reason: StopReason, *, but_kept: bool = False) -> None:
        """Write what is held of a group that gets no reward.

        Args:
            name: What the episode ids of the group begin with in this process.
            error: Why.
            reason: How its trajectories ended.
            but_kept: Whether those are left alone that a journal has: a later process goes on with them.
        """
        kept = self._kept.pop(name, [])
        for trajectory in (*([] if but_kept else kept), *self._held.pop(name, ())):
            trajectory.error, trajectory.stop_reason = clean(error), reason
            self._put(trajectory)

    def _put(self, trajectory: Trajectory) -> None:
        if not self._save_messages:
            trajectory.segments = [replace(segment, messages=()) for segment in trajectory.segments]
        if self._write is not None:
            self._write(trajectory)

    def _note(self, trajectory: Trajectory, named: Mapping[str, float]) -> None:
        weight = self._config.weight
        for name, value in named.items():
            trajectory.metrics[f"group/{name}"] = value
            if weight:
                trajectory.rewards.append((None, name, weight * value))

    async def _values(self, task: Task, members: Sequence[Trajectory]) -> list[dict[str, float]]:
        values: Any = await call_function(
            self._function,
            (task, list(members)),
            {},
            env=self._lender,
            what=self._label,
            timeout=self._config.timeout,
            inline=is_async(self._function),
        )
        if not isinstance(values, (list, tuple)) or len(values) != len(members):
            raise EnvError(
                f"{self._label} returned {shown(values)}: it must be a list with one entry for each of the "
                f"{len(members)} trajectories"
            )
        where = f"{self._label} returned"
        return [
            {name: finite(each, f"{where} {name!r}:") for name, each in named_numbers(value, where).items()}
            if isinstance(value, Mapping)
            else {"group": finite(value, where)}
            for value in values
        ]


def _compared(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the main trajectories of the trained policy as one list, else all of it by the group they are compared in.

    What a frozen policy did is compared with nothing, also where it is a frozen one that plays ``main``.
    """
    trained = [each for each in trajectories if each.policy == TRAINED]
    main = [each for each in trained if each.agent == "main"]
    if main:
        return [main]
    groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trained:
        groups[trajectory.group_id].append(trajectory)
    return list(groups.values())
