"""Tree rollouts: their configuration, and the choice of the turns that are sampled again."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Final, Self, TypeAlias

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from turnwise.config import ConfigReference, Section
from turnwise.errors import AgentError, ConfigError, shown
from turnwise.plugins import load_object


@dataclass(frozen=True, slots=True)
class TreeTurn:
    """A turn of a tree that can be sampled again.

    Attributes:
        branch: Index of the branch that sampled it; 0 is the initial episode.
        turn_id: The turn.
        session: Its session.
        number: Turns before it on its branch, shared ones included.
        tokens: Tokens that its branch sampled in it and after it.
        entropy: Mean negative log-probability of its sampled tokens, an estimate of their entropy from one sample.
        tool_calls: Tool calls that its branch made in it and after it.
        tool_errors: Tool calls of the turn that failed.
        forks: Branches that begin at it already.
        rewards: Rewards of the branches that pass the state before it.
    """

    branch: int
    turn_id: str
    session: str
    number: int
    tokens: int
    entropy: float
    tool_calls: int
    tool_errors: int
    forks: int = 0
    rewards: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """The mean of :attr:`rewards`: an estimate of the value of the state before the turn; 0 without any."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0

    def uncertainty(self, more: int = 0) -> float:
        """Return the squared standard error of :attr:`value`, as it were after ``more`` samples of equal variance.

        The variance of the rewards by their number: 0 while all are equal.
        """
        if not self.rewards:
            return 0.0
        variance = sum((reward - self.value) ** 2 for reward in self.rewards) / len(self.rewards)
        return variance / (len(self.rewards) + more)


Chooser: TypeAlias = Callable[[Sequence[TreeTurn], int, random.Random], Sequence[int]]
"""Maps turns, a number of branches and a random generator to the indices of the turns at which they begin; an index may
be given several times, and fewer than asked for."""


def random_turns(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> list[int]:
    """Return turns drawn at random, each once before any of them twice.

    The choice of Tree-GRPO: Ji et al. 2025 (arXiv:2509.21240), section 3.2.
    """
    indices: list[int] = []
    while turns and len(indices) < count:
        indices += draw.sample(range(len(turns)), min(len(turns), count - len(indices)))
    return indices


def _by_claim(
    turns: Sequence[TreeTurn], count: int, claim: Callable[[TreeTurn, int], Any]
) -> Iterator[tuple[int, Any]]:
    """Yield the turn with the highest claim and the claim, which depends on how often the turn was chosen before."""
    chosen = [0] * len(turns)
    for _ in range(count if turns else 0):
        claims = [claim(turn, times) for turn, times in zip(turns, chosen, strict=True)]
        index = max(range(len(turns)), key=claims.__getitem__)
        chosen[index] += 1
        yield index, claims[index]


def every_turn(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> list[int]:
    """Return the turns in their order, those with the fewest forks first, until ``count`` is reached."""
    del draw
    claims = _by_claim(turns, count, lambda turn, times: (-turn.forks - times, -turn.branch, -turn.number))
    return [index for index, _ in claims]


def uncertain_turns(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> list[int]:
    """Return the turns with the highest entropy, each fork of one halving its claim to another.

    To branch where the policy is uncertain: Dong et al. 2025, ARPO (arXiv:2507.19849), which looks at the change of the
    entropy after a tool's answer; here it is the turn's own.
    """
    del draw
    return [index for index, _ in _by_claim(turns, count, lambda turn, times: turn.entropy / 2 ** (turn.forks + times))]


def failed_tool_turns(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> list[int]:
    """Return turns with a tool call that failed, drawn as :func:`random_turns` does; none where none failed."""
    failed = [index for index, turn in enumerate(turns) if turn.tool_errors]
    return [failed[index] for index in random_turns([turns[position] for position in failed], count, draw)]


def undecided_turns(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> list[int]:
    """Return the turns before which the value is least certain, each fork counting as one more sample of it.

    While a state has been passed once, nothing is known of how its continuations differ: the first round, and what is
    left of a later one where all rewards are equal, is drawn as :func:`random_turns` does.
    """
    claims = takewhile(lambda choice: choice[1] > 0, _by_claim(turns, count, TreeTurn.uncertainty))
    indices = [index for index, _ in claims]
    return indices + random_turns(turns, count - len(indices), draw)


CHOOSERS: Final[dict[str, Chooser]] = {
    "random": random_turns,
    "every_turn": every_turn,
    "entropy": uncertain_turns,
    "tool_error": failed_tool_turns,
    "value": undecided_turns,
}
"""The choices of turns that have a name."""


class TreeConfig(Section):
    """Tree rollouts: each episode of a group is forked at some of its turns, and each fork continues alone.

    Attributes:
        branches: Forks of an episode, which are its branches besides the first.
        where: The turns that are sampled again: ``random``, ``every_turn``, ``entropy``, ``tool_error``,
            ``value``, or ``pkg.module:function`` (called with turns, number of
            branches and a random generator; returns indices).
        rounds: Rounds in which the tree is expanded; a later one may fork the branches of an earlier one.
        max_tokens: Sampled tokens of an episode with its branches; a branch that would exceed it, judged by what its
            original sampled from there on, is left out.
    """

    branches: PositiveInt
    where: ConfigReference = "random"
    rounds: PositiveInt = 1
    max_tokens: Annotated[int, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if not any(mark in self.where for mark in ":./") and self.where not in CHOOSERS:
            raise ValueError(f"where is {self.where!r}; allowed: {', '.join(CHOOSERS)}, or pkg.module:function")
        if self.rounds > self.branches:
            raise ValueError(f"rounds is {self.rounds}, but there are only {self.branches} branches: lower it")
        return self

    def chooser(self, key: str = "rollout.tree.where") -> Chooser:
        """Return the function that chooses turns; ``key`` names it in messages.

        Raises:
            ConfigError: It cannot be loaded, or does not take three arguments.
        """
        if self.where in CHOOSERS:
            return CHOOSERS[self.where]
        function = load_object(self.where, key)
        try:
            inspect.signature(function).bind(None, None, None)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key} {self.where!r} cannot be called as f(turns, count, random): {error}") from error
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{key} {self.where!r} is async: write a plain function")
        return _checked(f"{key} {self.where!r}", function)


def _checked(name: str, function: Callable[..., Any]) -> Chooser:
    def choose(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> list[int]:
        try:
            result = list(function(turns, count, draw))
        except Exception as error:  # a user's function: what it raises is named as its own
            raise AgentError(f"{name} raised {type(error).__name__}: {error}") from error
        # Also what numpy makes of an index; a truth value is none.
        indices = [
            int(index) for index in result if isinstance(index, (int, np.integer)) and not isinstance(index, bool)
        ]
        if len(indices) != len(result) or len(result) > count or any(not 0 <= index < len(turns) for index in indices):
            raise AgentError(
                f"{name} returned {shown(result)} for {len(turns)} turns and {count} branches: it "
                "must return at most as many indices of these turns as there are branches"
            )
        return indices

    return choose
