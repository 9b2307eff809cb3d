"""Scorers: what gives each branch of an episode the number by which a search chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

from turnwise.envs.core import Env
from turnwise.envs.rewards.core import GIVEN, Attempt, Part, ReadyPart, grade, ready_part
from turnwise.envs.rewards.groups import conversation_of
from turnwise.errors import ConfigError, EnvError, InferenceError, ScorerError
from turnwise.rollout.branching.search import ENVIRONMENT, LIKELIHOOD, ScorerConfig
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory
from turnwise.types import text_of

_WHERE: Final = "search.scorer"
MORE: Final = ("trajectory",)
"""What a scorer may name as a parameter besides :data:`~turnwise.envs.rewards.core.GIVEN`."""


class Scorer:
    """A scorer of branches, ready to use.

    Args:
        config: Names it.
        executor: Runs a plain function.

    Raises:
        ConfigError: It cannot be loaded, or takes what a branch does not have.
    """

    def __init__(self, config: ScorerConfig, executor: Executor | None = None) -> None:
        self.name = config.function
        self._part = None if config.function in (ENVIRONMENT, LIKELIHOOD) else _loaded(config)
        # An environment of no episode, which lends its threads.
        self._lender = Env()
        self._lender.executor = executor

    async def score(self, task: Task, branch: Sequence[Trajectory]) -> float:
        """Return the score of a branch.

        Args:
            task: The task.
            branch: Its trajectories, one for each session, without forks.

        Raises:
            ScorerError: The scorer raised, or returned no finite number.
        """
        trained = [trajectory for trajectory in branch if not trajectory.frozen]
        if self.name == ENVIRONMENT:
            return math.fsum(trajectory.reward for trajectory in trained)
        if self.name == LIKELIHOOD:
            return likelihood(trained)
        assert self._part is not None
        main = next(
            (trajectory for trajectory in trained if trajectory.agent == "main"), trained[0] if trained else branch[0]
        )
        try:
            return await grade(self._part, self._attempt(task, main))
        except (EnvError, InferenceError) as error:
            raise ScorerError(f"{_WHERE} {self.name!r} gave no score: {error}") from error

    def _attempt(self, task: Task, trajectory: Trajectory) -> Attempt:
        messages = conversation_of(trajectory)
        answers = [message for message in messages if message["role"] == "assistant"]
        final = answers[-1] if answers else None
        # A message that calls tools, or was answered, is no final answer.
        if final is not None and (final.get("tool_calls") or messages[-1] is not final):
            final = None
        text = "" if final is None else text_of(final)
        return Attempt(task, final, text, messages, task.data, self._lender, {"trajectory": trajectory})


def likelihood(branch: Sequence[Trajectory]) -> float:
    """Return the mean log-probability of the tokens that were sampled in a branch, over all of its sessions.

    Raises:
        ScorerError: No token with a log-probability was sampled.
    """
    sampled = [segment for trajectory in branch for segment in trajectory.segments if segment.sampled]
    logprobs = [segment.logprobs for segment in sampled if segment.logprobs is not None and len(segment.logprobs)]
    if not logprobs or any(len(segment.token_ids) and segment.logprobs is None for segment in sampled):
        raise ScorerError(
            f"{_WHERE} {LIKELIHOOD!r} gave no score: the branch has sampled tokens without log-probabilities, or none "
            "at all: choose another scorer"
        )
    return float(
        sum(float(turn_logprobs.sum(dtype=float)) for turn_logprobs in logprobs)
        / sum(len(turn_logprobs) for turn_logprobs in logprobs)
    )


def _loaded(config: ScorerConfig) -> ReadyPart:
    part = Part(config.function, arguments=config.arguments)
    try:
        ready = ready_part("scorer", part, None)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}: {error}; {ENVIRONMENT!r} and {LIKELIHOOD!r} are scorers besides") from error
    if ready.parameters.get("env"):
        raise ConfigError(
            f"{_WHERE} {config.function!r} takes 'env', but a branch is scored without its environment: take any of "
            f"{', '.join(name for name in (*GIVEN, *MORE) if name != 'env')}, or entries of task.data"
        )
    if "trajectories" in ready.parameters:
        raise ConfigError(
            f"{_WHERE} {config.function!r} compares trajectories, but a scorer gives a number to one: choose judge, "
            "reward_model or a function of one trajectory"
        )
    return ready
