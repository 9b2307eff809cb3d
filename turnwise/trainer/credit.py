"""Which turn of a trajectory is given how much of what it earned.

Owns: the ways of assigning credit, pure functions of numbers; :func:`load_credit` and :func:`assign`, which apply the
configured one to the trajectories of a step. Refuses: who is compared with whom (``Trajectory.group_id``), the
estimator without turns (``advantages.py``), and the weights of tokens in a loss, which no credit changes.

Turns are counted in commit order, over all branches of a trajectory: the number that ``TrainSample.turn_ids`` holds.

Two families, which differ in what comes first. ``same``, ``last`` and ``discounted`` compare whole trajectories, and
then share a trajectory's advantage out among its turns. ``turns`` and a function of the user's say first what each turn
is worth, and compare turns.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from turnwise.errors import ConfigError, TrainError, shown
from turnwise.references import load_object
from turnwise.trainer.advantages import Advantages
from turnwise.trainer.algorithm import AlgorithmConfig, CreditConfig
from turnwise.trainer.registry import Chosen
from turnwise.trajectory import TrainSample, Trajectory

Values: TypeAlias = npt.NDArray[np.float64]
"""One number for each turn of a trajectory."""
CreditFn: TypeAlias = Callable[[Trajectory], Sequence[float]]
"""What each turn of a trajectory is worth, in commit order."""


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """What the trajectories of a step are told.

    Attributes:
        values: For each trajectory one number for all its turns, or one for each.
        dead: Whether its group teaches nothing.
        groups: How many groups there were.
        dead_groups: How many of them teach nothing.
    """

    values: list[float | Values]
    dead: list[bool]
    groups: int
    dead_groups: int


def shares(name: str, turns: int, gamma: float) -> Values:
    """Return by how much each turn's share of its trajectory's advantage is multiplied, shape [turns].

    ``same``: 1. ``last``: 1 for the last turn, else 0. ``discounted``: ``gamma ** (turns - 1 - t)`` for turn t, so that
    the last one has all of it.
    """
    if name == "last":
        return np.array([float(turn == turns - 1) for turn in range(turns)], np.float64)
    if name == "discounted":
        return np.array([gamma ** (turns - 1 - turn) for turn in range(turns)], np.float64)
    return np.ones(turns)


def returns(rewards: Sequence[float], gamma: float) -> Values:
    """Return what follows from each turn on: ``G_t = r_t + gamma * G_(t+1)``, shape [turns]."""
    found = np.zeros(len(rewards))
    ahead = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        ahead = rewards[turn] + gamma * ahead
        found[turn] = ahead
    return found


def compared(
    worth: Sequence[Values], groups: Sequence[int], *, norm_by_std: bool, eps: float
) -> tuple[list[Values], list[bool]]:
    """Compare turns with all turns of their group, in which each trajectory counts once however many it has.

    For turn t of member i of a group of n: ``A_it = (w_it - m) / (s + eps)`` with the mean of the members' means,
    ``m = 1/n sum_i 1/T_i sum_t w_it``, and the spread around it, ``s^2 = 1/(n-1) sum_i 1/T_i sum_t (w_it - m)^2``.
    Without ``norm_by_std``: ``A_it = w_it - m``. Where all turns of each member are worth the same this is GRPO of the
    members. A group of one, and one whose turns are all worth the same, has advantage exactly 0.

    Args:
        worth: For each member an array with at least one turn.
        groups: For each member its group.
        norm_by_std: Whether to divide by the spread.
        eps: Added to the spread.

    Returns:
        The advantages of each member's turns, and whether its group teaches nothing.

    Raises:
        TrainError: A value is not finite.
    """
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    found: list[Values] = [np.zeros(len(values)) for values in worth]
    dead = [False] * len(worth)
    for numbers in members.values():
        every = np.concatenate([worth[number] for number in numbers])
        if not np.isfinite(every).all():
            raise TrainError(f"the turns of a group are worth {every.tolist()}: every number must be finite")
        if len(numbers) == 1 or every.min() == every.max():
            for number in numbers:
                dead[number] = True
            continue
        mean = math.fsum(float(worth[number].mean()) for number in numbers) / len(numbers)
        scale = 1.0
        if norm_by_std:
            squares = math.fsum(float(np.square(worth[number] - mean).mean()) for number in numbers)
            scale = math.sqrt(squares / (len(numbers) - 1)) + eps
        for number in numbers:
            found[number] = (worth[number] - mean) / scale
    return found, dead


def turn_rewards(trajectory: Trajectory) -> list[float]:
    """Return the rewards of each turn; those of the episode, and of turns that are not here, come with the last one."""
    numbers = {segment.turn_id: number for number, segment in enumerate(s for s in trajectory.segments if s.sampled)}
    last = len(numbers) - 1
    found = [0.0] * len(numbers)
    for turn_id, _, value in trajectory.rewards:
        found[last if turn_id is None else numbers.get(turn_id, last)] += value
    return found


def load_credit(config: CreditConfig) -> CreditFn | None:
    """Return the function that says what turns are worth, or None where none does.

    Raises:
        ConfigError: It cannot be loaded, or cannot be called with one trajectory.
    """
    if config.name == "turns":
        return lambda trajectory: [float(value) for value in returns(turn_rewards(trajectory), config.discount)]
    if not config.custom:
        return None
    function = load_object(config.name, "algorithm.credit")
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm.credit {config.name!r} cannot be called as f(trajectory): {error}") from error
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"algorithm.credit {config.name!r} is async: write a plain function of one trajectory")

    def checked(trajectory: Trajectory) -> list[float]:
        try:
            values = function(trajectory)
        except Exception as error:
            what = f"algorithm.credit {config.name!r} raised {type(error).__name__} for trajectory {trajectory.id}"
            raise TrainError(f"{what}: {error}") from error
        return _numbers(values, trajectory, f"algorithm.credit {config.name!r} returned")

    return checked


def assign(
    members: Sequence[Trajectory], config: AlgorithmConfig, baselines: Mapping[str, float] | None = None
) -> TurnAdvantages:
    """Return the advantages of the turns of trajectories, by the configured estimator and credit.

    Args:
        members: Trajectories in which something was sampled.
        config: The estimator, its options and the credit.
        baselines: What the greedy rollout of each group earned, for an estimator that reads it.

    Raises:
        RegistryError: No such estimator.
        ConfigError: The credit's function cannot be loaded.
        TrainError: A reward, or what a turn is worth, is not finite.
    """
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(each.group_id, len(numbers)) for each in members]
    worth = load_credit(config.credit)
    if worth is not None:
        found, gone = compared(
            [np.asarray(worth(each), np.float64) for each in members],
            groups,
            norm_by_std=config.norm_by_std,
            eps=config.std_eps,
        )
        dead_groups = len({group for group, is_dead in zip(groups, gone, strict=True) if is_dead})
        return TurnAdvantages([*found], gone, len(numbers), dead_groups)
    result = estimated(members, groups, config.chosen_advantage(), baselines or {})
    values: list[float | Values] = [float(value) for value in result.values]
    if config.credit.name != "same":
        values = [
            value * shares(config.credit.name, _turns(each), config.credit.discount)
            for value, each in zip(values, members, strict=True)
        ]
    return TurnAdvantages(values, [bool(flag) for flag in result.dead], result.groups, result.dead_groups)


def estimated(
    members: Sequence[Trajectory], groups: Sequence[int], estimate: Chosen, baselines: Mapping[str, float]
) -> Advantages:
    """Return the advantages of whole trajectories.

    Args:
        members: Trajectories in which something was sampled.
        groups: For each its group.
        estimate: The estimator with its options.
        baselines: What the greedy rollout earned, by group id; read where the estimator asks for it.

    Raises:
        TrainError: A reward is not finite, or an estimator of the user's returned something else than advantages.
    """
    rewards = torch.tensor([each.reward for each in members], dtype=torch.float64)
    names = sorted({name for each in members for _, name, _ in each.rewards})
    sums = [[sum(value for _, said, value in each.rewards if said == name) for each in members] for name in names]
    data: dict[str, Any] = {
        "lengths": torch.tensor([each.sampled_tokens for each in members], dtype=torch.int64),
        "components": {name: torch.tensor(each, dtype=torch.float64) for name, each in zip(names, sums, strict=True)},
    }
    if "baselines" in estimate.reads:
        data["baselines"] = torch.tensor([baselines[each.group_id] for each in members], dtype=torch.float64)
    result = estimate(rewards, torch.tensor(groups, dtype=torch.int64), **data)
    if not isinstance(result, Advantages) or result.values.shape != rewards.shape:
        raise TrainError(
            f"algorithm.advantage {estimate.name!r} returned {shown(result)}; it must return "
            "turnwise.trainer.advantages.Advantages with one value for each reward"
        )
    return result


def on_tokens(sample: TrainSample, value: float | Values) -> float | npt.NDArray[np.float32]:
    """Return the advantage of a row's tokens: the one of their turn, 0 where nothing was sampled."""
    if isinstance(value, float):
        return value
    known = np.append(value, 0.0).astype(np.float32)
    return known[sample.turn_ids]


def credit_metrics(found: TurnAdvantages) -> dict[str, float]:
    """Return how unevenly turns are told, where they are told apart."""
    apart = [each for each in found.values if not isinstance(each, float)]
    if not apart:
        return {}
    turns = np.concatenate(apart)
    return {
        "credit/spread": float(np.mean([np.ptp(each) for each in apart])),
        "credit/silent_turns": float(np.mean(turns == 0)),
        "credit/first": float(np.mean([abs(each[0]) for each in apart])),
        "credit/last": float(np.mean([abs(each[-1]) for each in apart])),
    }


def _turns(trajectory: Trajectory) -> int:
    return sum(segment.sampled for segment in trajectory.segments)


def _numbers(values: Any, trajectory: Trajectory, what: str) -> list[float]:
    turns = _turns(trajectory)
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(listed, (list, tuple)) or len(listed) != turns:
        raise TrainError(
            f"{what} {shown(values)} for trajectory {trajectory.id}: it must be a list of {turns} numbers, one for "
            "each turn in commit order"
        )
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
            raise TrainError(f"{what} {shown(value)} for a turn of trajectory {trajectory.id}: not a finite number")
    return [float(value) for value in listed]
