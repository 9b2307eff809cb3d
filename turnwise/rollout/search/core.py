"""The choice among the ways through an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Executor

from turnwise.agents.core import Agent
from turnwise.envs.core import Env
from turnwise.errors import ConfigError
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.growth import Grown, ways_of
from turnwise.rollout.search.config import SearchConfig
from turnwise.rollout.search.scorers import Scorer
from turnwise.tasks.core import Task
from turnwise.types import Search


class Searcher:
    """Scores the ways through an episode and chooses one.

    Args:
        config: The search.
        executor: Runs a scorer that is a plain function.

    Raises:
        ConfigError: Scorer or ``where`` cannot be loaded.
    """

    def __init__(self, config: SearchConfig, executor: Executor | None = None) -> None:
        self.config = config
        self._scorer = Scorer(config.scorer, executor)
        if config.kind == "tree":
            config.tree().chooser("search.where")

    async def choose(self, task: Task, tree: Sequence[Grown], frozen: Collection[str] = ()) -> Search:
        """Return the choice of the way with the highest score, the first of several.

        Args:
            task: The task.
            tree: The ways.
            frozen: Sessions whose policy is never trained.

        Raises:
            ScorerError: A way got no score.
        """
        scores = await asyncio.gather(
            *(self._scorer.score(task, way) for way in ways_of(tree, frozen)), return_exceptions=True
        )
        for score in scores:
            if isinstance(score, BaseException):
                raise score
        scores_by_branch = tuple(score for score in scores if not isinstance(score, BaseException))
        best = max(range(len(scores_by_branch)), key=scores_by_branch.__getitem__)
        return Search(self.config.kind, self.config.scorer.function, best, scores_by_branch)


def check_forks(config: RolloutConfig, search: SearchConfig | None, env: Env, agent: Agent) -> None:
    """Check that an environment and an agent can be forked, where a tree or a search forks them.

    Raises:
        ConfigError: They cannot, or ``rollout.tree.where`` cannot be loaded.
    """
    if config.tree is not None:
        config.tree.chooser()
    if search is not None and search.forks:
        key, remedy = f"search.kind {search.kind}", "choose kind best_of_n"
    elif config.tree is not None:
        key, remedy = "rollout.tree", "leave rollout.tree out"
    else:
        return
    if not env.supports_fork:
        raise ConfigError(
            f"{key}: environment {config.env.name!r} cannot be forked ({type(env).__qualname__}.forks is None): write "
            f'its fork(), set forks = "replay" if its answers depend on seed and actions alone, or {remedy}'
        )
    if not agent.forkable:
        raise ConfigError(
            f"{key}: the agent {config.agent.name!r} is a program of its own, which cannot be forked: choose an agent "
            f"that runs in this process, or {remedy}"
        )
