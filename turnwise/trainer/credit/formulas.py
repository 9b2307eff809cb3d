"""The formulas of credit: pure functions of numbers.

Owns: :func:`shares`, :func:`returns`, :func:`token_returns` and :func:`compared`. Refuses: trajectories and
configuration. The comparison of turns from the same state is ``advantages.gigpo``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from turnwise.errors import TrainError

Values: TypeAlias = npt.NDArray[np.float64]
"""One number for each turn of a trajectory, or for each sampled token of it, in commit order."""


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


def token_returns(rewards: Sequence[float], tokens: Sequence[int], gamma: float) -> Values:
    """Return what follows from each sampled token on, shape [sum of tokens]: ``G_t = r_t + gamma * G_(t+1)``.

    The reward of a turn comes with its last token; the token after the last one of a turn is the first one of the next:
    what was not sampled is no step. The return of REINFORCE (Williams 1992), discounted per token as in Hu et al. 2025,
    REINFORCE++ (arXiv:2501.03262).

    Args:
        rewards: Of each turn.
        tokens: How many tokens each turn sampled; the reward of one without any comes with the token before it.
        gamma: Discount from one sampled token to the next.
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
