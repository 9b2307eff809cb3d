"""Credit assignment: from rewards to returns of turns or tokens, and turns' shares of a trajectory's advantage.

Turns are numbered in commit order over all branches of a trajectory, as in ``TrainSample.turn_ids``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from turnwise.config import ConfigReference, Section
from turnwise.errors import ConfigError, TrainError, shown
from turnwise.plugins import load_object
from turnwise.trainer.algorithms.rewards import BranchRewards, StepRewards
from turnwise.trainer.algorithms.trees import TREE_CREDITS, Tree
from turnwise.trajectory import Trajectory

CREDITS: Final = ("same", "last", "discounted", "turns", "tokens", "gigpo", *TREE_CREDITS)
"""The built-in credits."""
DISCOUNTING: Final = CREDITS[2:6]
"""Those that read ``gamma``."""
AnchorState: TypeAlias = Literal["named", "seen", "shown"]
"""What makes two states of turns equal."""

Values: TypeAlias = npt.NDArray[np.float64]
"""One number for each turn of a trajectory, or for each sampled token of it, in commit order."""


class CreditConfig(Section):
    """How a trajectory's reward is credited to its turns. A string is its ``name``.

    Attributes:
        name: ``same``: every turn gets the trajectory's advantage; ``last``: only the last turn does; ``discounted``:
            the last turn gets all of it and each earlier one ``gamma`` times that of the next; ``turns``: each turn by
            its return, the rewards on it and after it; ``tokens``: the same per sampled token; ``gigpo``: the
            trajectory's advantage plus that of the turn among the group's turns from the same state; ``tree_grpo`` and
            ``tree_value``: of forked episodes (``rollout.tree``), see ``trees.py``; or
            ``pkg.module:function``, which maps a trajectory to the returns of its turns, or a whole ``group`` to the
            advantages of its turns.
        gamma: In (0, 1]. Required by ``discounted``; the discount of ``turns``, ``tokens`` and ``gigpo``, default 1.
        state: ``gigpo``: what identifies the state before a turn: the ``named`` state (``info["state"]`` of the
            environment), all tokens that the model has ``seen``, or the latest observation that it was ``shown``; None
            is ``named`` where the environment names it, else ``seen``.
    """

    name: ConfigReference = "same"
    gamma: Annotated[float, Field(gt=0, le=1)] | None = None
    state: AnchorState | None = None

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if not self.custom and self.name not in CREDITS:
            raise ValueError(f"name is {self.name!r}; allowed: {', '.join(CREDITS)}, or pkg.module:function")
        if self.name == "discounted" and self.gamma is None:
            raise ValueError("gamma, in (0, 1]: by how much a turn counts less than the one after it")
        if self.gamma is not None and self.name not in DISCOUNTING:
            raise ValueError(f"no gamma: {self.name!r} does not discount")
        if self.state is not None and self.name != "gigpo":
            raise ValueError(f"no state: {self.name!r} compares no turns from the same state, gigpo does")
        return self

    @property
    def custom(self) -> bool:
        """Whether credit comes from a custom function."""
        return any(mark in self.name for mark in ":./")

    @property
    def compares(self) -> bool:
        """Whether turns or tokens are compared, not only whole trajectories."""
        return self.custom or self.name in ("turns", "tokens", "gigpo", *TREE_CREDITS)

    @property
    def of_trees(self) -> bool:
        """Whether the branches of forked episodes are compared."""
        return self.name in TREE_CREDITS


@dataclass(frozen=True, slots=True)
class TrajectoryCredit:
    """Trajectories are compared; their turns share the advantage.

    Attributes:
        shares: Per trajectory the factor of each turn, shape [turns]; None is 1 for all.
    """

    shares: list[Values] | None


@dataclass(frozen=True, slots=True)
class ReturnCredit:
    """Returns of turns or tokens are compared.

    Attributes:
        returns: Per trajectory float64 of shape [turns] or [sampled tokens].
        token_starts: Per trajectory the index of each turn's first token; None where returns are of turns.
    """

    returns: list[Values]
    token_starts: list[npt.NDArray[np.int64]] | None = None


@dataclass(frozen=True, slots=True)
class StateCredit:
    """Trajectories are compared, and returns of turns from the same state.

    Attributes:
        returns: Per trajectory float64 of shape [turns].
        states: Per trajectory the state before each turn.
    """

    returns: list[Values]
    states: list[list[Hashable]]


@dataclass(frozen=True, slots=True)
class CustomAdvantages:
    """Advantages of turns from a custom function.

    Attributes:
        advantages: Per trajectory float64 of shape [turns].
    """

    advantages: list[Values]


@dataclass(frozen=True, slots=True)
class TreeCredit:
    """Branches of forked episodes are compared.

    Attributes:
        name: Of ``TREE_CREDITS``.
        trees: Per trajectory its tree.
    """

    name: str
    trees: list[Tree]


Credit: TypeAlias = TrajectoryCredit | ReturnCredit | StateCredit | TreeCredit | CustomAdvantages


def assign_credit(trajectories: Sequence[Trajectory], rewards: StepRewards, config: CreditConfig) -> Credit:
    """Assign the rewards of trajectories to what is compared.

    Raises:
        ConfigError: The custom function cannot be loaded.
        TrainError: The custom function failed, or a state has no name where one is required.
    """
    custom = load_credit(config)
    if custom is not None and custom.of_group:
        return CustomAdvantages(_by_group(trajectories, rewards.groups, custom))
    if custom is not None:
        returns = [custom.call(trajectory, f"trajectory {trajectory.id}") for trajectory in trajectories]
        pairs_of_turns = zip(returns, trajectories, strict=True)
        return ReturnCredit([custom.read_numbers(of_turns, trajectory) for of_turns, trajectory in pairs_of_turns])
    if config.of_trees:
        return TreeCredit(config.name, [Tree.of(trajectory) for trajectory in trajectories])
    gamma = 1.0 if config.gamma is None else config.gamma
    if config.name == "tokens":
        pairs = list(zip(rewards.branches, rewards.turn_lengths, strict=True))
        starts = [_token_starts(lengths)[:-1] for _, lengths in pairs]
        return ReturnCredit([_token_returns_of(branches, lengths, gamma) for branches, lengths in pairs], starts)
    if config.name in ("turns", "gigpo"):
        returns = [
            _mean_over_branches(branches, len(lengths), lambda branch: turn_returns(branch.rewards, gamma))
            for branches, lengths in zip(rewards.branches, rewards.turn_lengths, strict=True)
        ]
        if config.name == "turns":
            return ReturnCredit(returns)
        states = [anchor_states(trajectory, config.state) for trajectory in trajectories]
        return StateCredit(returns, states)
    if config.name == "same":
        return TrajectoryCredit(None)
    pairs = list(zip(rewards.branches, rewards.turn_lengths, strict=True))
    return TrajectoryCredit([_shares_of(branches, lengths, config.name, gamma) for branches, lengths in pairs])


def _mean_over_branches(branches: Sequence[BranchRewards], size: int, of: Callable[[BranchRewards], Values]) -> Values:
    """Return the mean over the branches that hold a turn of its number in each; 0 for a turn that no branch holds."""
    total, holders = np.zeros(size), np.zeros(size)
    for branch in branches:
        total[list(branch.turns)] += of(branch)
        holders[list(branch.turns)] += 1
    return np.divide(total, holders, out=np.zeros(size), where=holders > 0)


def _token_starts(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _token_returns_of(branches: Sequence[BranchRewards], lengths: Sequence[int], gamma: float) -> Values:
    """Return the return of each sampled token of a trajectory, its mean over the branches that hold the token."""
    starts = _token_starts(lengths)
    total, holders = np.zeros(starts[-1]), np.zeros(starts[-1])
    for branch in branches:
        tokens = np.concatenate([np.zeros(0, np.int64), *(np.arange(starts[t], starts[t + 1]) for t in branch.turns)])
        total[tokens] += token_returns(branch.rewards, [lengths[turn] for turn in branch.turns], gamma)
        holders[tokens] += 1
    return np.divide(total, holders, out=np.zeros(len(total)), where=holders > 0)


def _shares_of(branches: Sequence[BranchRewards], lengths: Sequence[int], name: str, gamma: float) -> Values:
    """Return the share of each turn of a trajectory, its mean over the branches that hold the turn."""

    def of_branch(branch: BranchRewards) -> Values:
        # The last turn is the last one with ids: an empty one has no token that could take its share.
        reached = len(np.trim_zeros(np.array([lengths[turn] for turn in branch.turns]), "b"))
        return np.pad(turn_shares(name, reached, gamma), (0, len(branch.turns) - reached))

    return _mean_over_branches(branches, len(lengths), of_branch)


def _by_group(trajectories: Sequence[Trajectory], groups: Sequence[int], custom: CustomCredit) -> list[Values]:
    """Call a custom function per group; a group of one has advantage 0."""
    advantages: list[Values] = [np.zeros(_turns(trajectory)) for trajectory in trajectories]
    for group in sorted(set(groups)):
        numbers = [number for number, other in enumerate(groups) if other == group]
        if len(numbers) < 2:
            continue
        members = [trajectories[number] for number in numbers]
        where = f"group {members[0].group_id}"
        of_group = custom.call(members, where)
        if not isinstance(of_group, (list, tuple)) or len(of_group) != len(members):
            raise TrainError(
                f"{custom.what} returned {shown(of_group)} for {where}: it must be a list of {len(members)} lists, one "
                "for each trajectory in their order"
            )
        for number, of_turns in zip(numbers, of_group, strict=True):
            advantages[number] = custom.read_numbers(of_turns, trajectories[number])
    return advantages


def _turns(trajectory: Trajectory) -> int:
    return sum(segment.sampled for segment in trajectory.segments)


def turn_shares(name: str, turns: int, gamma: float) -> Values:
    """Return the factor of each turn's share of its trajectory's advantage, shape [turns].

    ``same``: 1. ``last``: 1 for the last turn, else 0. ``discounted``: ``gamma ** (turns - 1 - t)`` for turn t.
    """
    if name == "last":
        return np.array([float(turn == turns - 1) for turn in range(turns)], np.float64)
    if name == "discounted":
        return np.array([gamma ** (turns - 1 - turn) for turn in range(turns)], np.float64)
    return np.ones(turns)


def turn_returns(rewards: Sequence[float], gamma: float) -> Values:
    """Return the discounted return of each turn: ``G_t = r_t + gamma * G_(t+1)``, shape [turns]."""
    returns = np.zeros(len(rewards))
    ahead = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        ahead = rewards[turn] + gamma * ahead
        returns[turn] = ahead
    return returns


def token_returns(rewards: Sequence[float], tokens: Sequence[int], gamma: float) -> Values:
    """Return the discounted return of each sampled token, shape [sum of tokens]: ``G_t = r_t + gamma * G_(t+1)``.

    A turn's reward is on its last token (of an empty turn, on the token before it); only sampled tokens are time steps.
    The return of REINFORCE (Williams 1992), discounted per token as in Hu et al. 2025, REINFORCE++ (arXiv:2501.03262).
    """
    parts: list[Values] = []
    ahead = 0.0
    for reward, count in zip(reversed(rewards), reversed(tokens), strict=True):
        if not count:
            ahead += reward / gamma
            continue
        part = gamma ** np.arange(count - 1, -1, -1, dtype=np.float64) * (reward + gamma * ahead)
        ahead = float(part[0])
        parts.append(part)
    return np.concatenate(parts[::-1]) if parts else np.zeros(0)


def anchor_states(trajectory: Trajectory, state: AnchorState | None) -> list[Hashable]:
    """Return the state before each turn, in commit order; GiGPO compares turns with equal states.

    Args:
        trajectory: The trajectory.
        state: ``named``: the environment's state name after the preceding turn of the branch, or the session's initial
            one. ``seen``: all token ids so far. ``shown``: the token ids since the preceding turn of the branch. None:
            ``named`` where the environment names states, else ``seen``.

    Raises:
        TrainError: State names are required, and one is missing.
    """
    # Of the ids up to each segment's end, and of those since the turn before it: how they were cut says nothing.
    all_ids: list[blake2b] = []
    since: list[blake2b] = []
    names: list[str | None] = []
    states: list[Hashable] = []
    for segment in trajectory.segments:
        root = segment.parent < 0
        ids_before = blake2b(digest_size=16) if root else all_ids[segment.parent].copy()
        news = blake2b(digest_size=16) if root else since[segment.parent].copy()
        name = trajectory.states.get("") if root else names[segment.parent]
        if segment.sampled:
            if state == "named" and name is None:
                raise TrainError(
                    f"algorithm.credit.state is named, but the environment gave none before turn {len(states)} of "
                    f"trajectory {trajectory.id}: return info['state'] (a text or a whole number) from reset and step, "
                    "or set it to seen or shown"
                )
            has_name = name is not None and state in (None, "named")
            states.append(("named", name) if has_name else (news if state == "shown" else ids_before).digest())
            name = trajectory.states.get(segment.turn_id or "")
        ids = segment.token_ids.tobytes()
        ids_before.update(ids)
        news.update(ids)
        all_ids.append(ids_before)
        since.append(blake2b(digest_size=16) if segment.sampled else news)
        names.append(name)
    return states


@dataclass(frozen=True, slots=True)
class CustomCredit:
    """A custom credit function.

    Attributes:
        name: Its reference in the configuration.
        function: Maps a trajectory to the returns of its turns, or a group to each trajectory's turn advantages.
        of_group: Whether it takes a group.
    """

    name: str
    function: Callable[[Any], Any]
    of_group: bool

    @property
    def what(self) -> str:
        """How messages name it."""
        return f"algorithm.credit {self.name!r}"

    def call(self, argument: Any, where: str) -> Any:
        """Call the function; raises TrainError with what it raised."""
        try:
            return self.function(argument)
        except Exception as error:  # a user's function: what it raises is named as its own
            raise TrainError(f"{self.what} raised {type(error).__name__} for {where}: {error}") from error

    def read_numbers(self, values: Any, trajectory: Trajectory) -> Values:
        """Return the numbers of a trajectory's turns, in commit order; raises TrainError where they are none."""
        turns = _turns(trajectory)
        value_list = values.tolist() if isinstance(values, np.ndarray) else values
        if not isinstance(value_list, (list, tuple)) or len(value_list) != turns:
            raise TrainError(
                f"{self.what} returned {shown(values)} for trajectory {trajectory.id}: it must be a list of {turns} "
                "numbers, one for each turn in commit order"
            )
        for value in value_list:
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
                what = f"{self.what} returned {shown(value)}"
                raise TrainError(f"{what} for a turn of trajectory {trajectory.id}: not a finite number")
        return np.array(value_list, np.float64)


def load_credit(config: CreditConfig) -> CustomCredit | None:
    """Load the custom function, or return None for a built-in credit.

    A function whose parameter is called ``group`` takes a group, any other a trajectory.

    Raises:
        ConfigError: It cannot be loaded, or cannot be called with one argument.
    """
    if not config.custom:
        return None
    function = load_object(config.name, "algorithm.credit")
    try:
        bound = inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"algorithm.credit {config.name!r} cannot be called as f(trajectory) or f(group): {error}"
        ) from error
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"algorithm.credit {config.name!r} is async: write a plain function")
    return CustomCredit(config.name, function, "group" in bound.arguments)
