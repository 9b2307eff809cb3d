"""The choice among the ways through an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor

from turnwise.agents.core import Agent, Episode
from turnwise.envs.core import Env, StepResult
from turnwise.errors import ConfigError
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.growth import Grown, ways_of
from turnwise.rollout.search.config import SearchConfig
from turnwise.rollout.search.scorers import Scorer
from turnwise.tasks.core import Task
from turnwise.types import Message, Search


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

    async def rate(
        self, task: Task, tree: Sequence[Grown], wanted: Mapping[int, bool], frozen: Collection[str] = ()
    ) -> list[float]:
        """Return the scores of some ways.

        Args:
            task: The task.
            tree: All ways.
            wanted: Their indices, with whether each has ended.
            frozen: Sessions whose policy is never trained.

        Raises:
            ScorerError: A way got no score.
        """
        ways = ways_of(tree, frozen)
        scores = await asyncio.gather(
            *(
                self._scorer.score(
                    task, ways[index], ended=ended, observed=() if ended else _observed(tree[index].episode)
                )
                for index, ended in wanted.items()
            ),
            return_exceptions=True,
        )
        found = []
        for score in scores:
            if isinstance(score, BaseException):
                raise score
            found.append(score)
        return found

    def choose(self, scores: Sequence[float | None], complete: Collection[int]) -> Search:
        """Return the choice of the complete way with the highest score, the first of several.

        Args:
            scores: Of all ways.
            complete: Indices of those that went to their end, at least one.
        """
        best = max(sorted(complete), key=lambda index: _known(scores[index]))
        return Search(self.config.kind, self.config.scorer.function, best, tuple(scores))


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


def _known(score: float | None) -> float:
    assert score is not None
    return score


def _observed(episode: Episode) -> list[Message]:
    """Return what an environment answered since the last turn of an episode that waits before its next one."""
    record = episode.record
    assert record is not None
    inherited = 0 if record.point is None else record.point.answers
    before = record.points[-2].answers if len(record.points) > 1 else inherited
    found: list[Message] = []
    for answer in record.answers[before:]:
        if isinstance(answer.result, StepResult):
            seen = answer.result.observation
            found += [{"role": "user", "content": seen}] if isinstance(seen, str) else seen
        else:
            found.append({"role": "tool", "content": answer.result.text})
    return found
