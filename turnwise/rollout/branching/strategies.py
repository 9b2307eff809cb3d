"""The strategy that adds branches to an episode that has ended: a tree in training, a search in an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

from turnwise.agents.core import Agent, Episode
from turnwise.agents.forks import BranchPoint
from turnwise.envs.core import Env
from turnwise.errors import ConfigError, InferenceError, TurnwiseError
from turnwise.rollout.branching.branches import TreeBranch, expand, unmerged_trajectories
from turnwise.rollout.branching.scorers import Scorer
from turnwise.rollout.branching.search import SearchConfig
from turnwise.rollout.branching.tree import TreeConfig
from turnwise.seeding import stable_hash
from turnwise.tasks.core import Task
from turnwise.types import WHY_UNFORKED, Search, StopReason


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Where a fork begins: at a point of another episode, as the n-th branch of its tree."""

    origin: Episode
    point: BranchPoint
    number: int


@dataclass(frozen=True, slots=True)
class BranchAttempt:
    """An attempt at a branch, closed: its episode (None where the reset failed), why it ended, and what failed."""

    episode: Episode | None
    stop_reason: StopReason
    error: Exception | None


RunBranch: TypeAlias = Callable[[int, ForkPoint | None], Awaitable[BranchAttempt]]
"""Runs the n-th branch of an episode once: from a fork on, or from the reset."""


@dataclass(frozen=True, slots=True)
class BranchLimits:
    """What the branches of all episodes share.

    Attributes:
        slots: Held by every running branch.
        retries: Further attempts at a branch after an infrastructure failure.
        recover: Awaited after an inference failure, before the next attempt; without it such a failure is that of the
            episode.
    """

    slots: asyncio.Semaphore
    retries: int
    recover: Callable[[InferenceError], Awaitable[None]] | None


class BranchRunner:
    """Runs the branches of one episode, each again after an infrastructure failure.

    Attributes:
        failures: Attempts that failed.
    """

    def __init__(self, first: Episode, run_once: RunBranch, limits: BranchLimits) -> None:
        self._first = first
        self._run_once = run_once
        self._limits = limits
        self.failures = 0

    async def run_fork(self, parent: TreeBranch, index: int, point: BranchPoint, number: int) -> TreeBranch | None:
        """Run a fork of a branch, given with its index; None where it failed for good.

        Raises:
            InferenceError: The server failed, and is not recovered here.
        """
        fork = ForkPoint(parent.episode, point, number)
        return await self._run(number, fork, parent.episode, index)

    async def run_again(self, number: int) -> TreeBranch | None:
        """Run the episode again from its reset; as :meth:`run_fork`."""
        return await self._run(number, None, self._first, 0)

    async def _run(self, number: int, fork: ForkPoint | None, parent: Episode, index: int) -> TreeBranch | None:
        async with self._limits.slots:
            for _ in range(self._limits.retries + 1):
                attempt = await self._run_once(number, fork)
                error = attempt.error
                if error is None and attempt.episode is not None:
                    point = None if fork is None else fork.point
                    return TreeBranch(attempt.episode, attempt.stop_reason, index, point)
                self.failures += 1
                parent.turn_notes.setdefault(("main", None), {})[WHY_UNFORKED] = f"{type(error).__name__}: {error}"
                if isinstance(error, InferenceError):
                    if self._limits.recover is None:
                        raise error
                    await self._limits.recover(error)
                if not (isinstance(error, TurnwiseError) and error.retryable):
                    break
        return None


class BranchingStrategy:
    """Adds branches to an episode that has ended: a tree, all of which is trained, or a search, which chooses one.

    Args:
        config: The tree, or the search.
        executor: Runs a scorer that is a plain function.

    Raises:
        ConfigError: Scorer or ``where`` cannot be loaded.
    """

    def __init__(self, config: TreeConfig | SearchConfig, executor: Executor | None = None) -> None:
        self._search: SearchConfig | None = None
        self._scorer: Scorer | None = None
        self._tree: TreeConfig | None
        if isinstance(config, SearchConfig):
            self._key, self._instead = f"search.kind {config.kind}", "choose kind best_of_n"
            self._search, self._scorer = config, Scorer(config.scorer, executor)
            self._tree = config.tree() if config.forks else None
        else:
            self._key, self._instead = "rollout.tree", "leave rollout.tree out"
            self._tree = config
        if self._tree is not None:
            self._tree.chooser("rollout.tree.where" if self._search is None else "search.where")

    @property
    def forks(self) -> bool:
        """Whether branches begin in the middle of the episode, which is recorded for it."""
        return self._tree is not None

    async def expand(self, first: TreeBranch, seed: int, branches: BranchRunner) -> tuple[list[TreeBranch], int]:
        """Fork an episode at the turns that ``where`` chooses, or run it again.

        Args:
            first: The episode.
            seed: Its sampling seed.
            branches: Runs its branches.

        Returns:
            All branches, the episode first, and the number of those that did not fit the budget.
        """
        if self._tree is not None:
            return await expand(first, self._tree, stable_hash("tree", seed), branches.run_fork)
        samples = 1 if self._search is None else self._search.samples or 1
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(branches.run_again(number)) for number in range(1, samples)]
        return [first, *(branch for task in running if (branch := task.result()) is not None)], 0

    async def choose(self, task: Task, tree: Sequence[TreeBranch], frozen: Collection[str]) -> Search | None:
        """Return the choice of the branch with the highest score, the first of several; None where all count.

        Args:
            task: The task.
            tree: The branches.
            frozen: Sessions whose policy is never trained.

        Raises:
            ScorerError: A branch got no score.
        """
        if self._search is None or self._scorer is None:
            return None
        scoring = [self._scorer.score(task, branch) for branch in unmerged_trajectories(tree, frozen)]
        scores: list[float] = []
        # All scorers finish, also where one of them fails.
        for score in await asyncio.gather(*scoring, return_exceptions=True):
            if isinstance(score, BaseException):
                raise score
            scores.append(score)
        best = max(range(len(scores)), key=scores.__getitem__)
        return Search(self._search.kind, self._search.scorer.function, best, tuple(scores))

    def check(self, env: Env, env_name: str, agent: Agent, agent_name: str) -> None:
        """Check that environment and agent can be forked. Raises ConfigError."""
        if not self.forks:
            return
        if not env.supports_fork:
            raise ConfigError(
                f"{self._key}: environment {env_name!r} cannot be forked ({type(env).__qualname__}.forks is None): "
                f'write its fork(), set forks = "replay" if its answers depend on seed and actions alone, or '
                f"{self._instead}"
            )
        if not agent.forkable:
            raise ConfigError(
                f"{self._key}: the agent {agent_name!r} is an external program, which cannot be forked: choose an "
                f"agent that runs in this process, or {self._instead}"
            )
