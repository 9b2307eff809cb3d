"""Advantages within a trajectory: of its tokens or of its turns.

Owns: :func:`gae`, :func:`returns_to_go` and :func:`gigpo`. Refuses: critics, which give the values. A caller who has
numbers per turn hands those in as they are: turn-level GAE is :func:`gae` of turns.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trainer.advantages.core import Groups


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    last_value: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation of one row, across what was not sampled.

    ``delta_t = r_t + gamma V_(t+1) - V_t``, ``A_t = delta_t + gamma lam A_(t+1)``, returns ``A_t + V_t``: Schulman et
    al. 2015 (arXiv:1506.02438), eq. 16. t+1 is the next sampled token: observations in between are no steps,
    neither discounted nor asked for a value.

    Args:
        rewards: Shape [T]; 0 where nothing was sampled.
        values: Shape [T]; read where something was sampled.
        mask: bool of shape [T], true on sampled tokens; None takes all (turns, for instance).
        gamma: Discount from one step to the next.
        lam: How far estimates reach (0: one step, 1: to the end).
        last_value: Value of what comes after the end: 0 where the episode ended, the critic's where it was cut off.

    Returns:
        Advantages and returns, each of shape [T], 0 where nothing was sampled.

    Raises:
        TrainError: Shapes differ, or a reward stands where nothing was sampled.
    """
    kept = _steps(rewards, values, mask)
    # Lists, not tensors: reading an element of a tensor costs ten times the arithmetic.
    earned, expected = rewards.tolist(), values.tolist()
    advantages, returns = [0.0] * len(earned), [0.0] * len(earned)
    ahead, following = 0.0, last_value
    for index in reversed(kept):
        value = expected[index]
        ahead = earned[index] + gamma * following - value + gamma * lam * ahead
        advantages[index], returns[index] = ahead, ahead + value
        following = value
    return torch.tensor(advantages, dtype=values.dtype), torch.tensor(returns, dtype=values.dtype)


def returns_to_go(rewards: Tensor, mask: Tensor | None = None, *, gamma: float = 1.0) -> Tensor:
    """What follows from each sampled token on: ``G_t = r_t + gamma G_(t+1)``, 0 where nothing was sampled.

    The return of REINFORCE (Williams 1992), discounted per sampled token as in REINFORCE++ (arXiv:2501.03262).

    Args:
        rewards: Shape [T]; 0 where nothing was sampled.
        mask: bool of shape [T], true on sampled tokens; None takes all.
        gamma: Discount from one sampled token to the next.

    Raises:
        TrainError: Shapes differ, or a reward stands where nothing was sampled.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma)[1]


def gigpo(
    rewards: Tensor,
    groups: Tensor,
    step_returns: Sequence[Tensor],
    anchors: Sequence[Sequence[Hashable]],
    *,
    omega: float = 1.0,
    norm_by_std: bool = True,
    eps: float = 1e-4,
) -> list[Tensor]:
    """Group-in-group advantages: of the episode within its group, plus of each turn among turns from the same state.

    ``A_it = A^E_i + omega A^S_it``; ``A^E`` as GRPO; ``A^S_it = (G_it - mean) / (std + eps)`` over the turns of the
    group that began in the same state, ``G_it`` their discounted returns: Feng et al. 2025, GiGPO (arXiv:2505.10978),
    section 4. A state that was met once gives 0, and so does a group of one. Without ``norm_by_std`` both divisors are
    1.

    Args:
        rewards: Shape [n], of the episodes.
        groups: Shape [n], integers.
        step_returns: For each trajectory the returns of its turns, shape [turns].
        anchors: For each trajectory what identifies the state before each turn.
        omega: Weight of the comparison of turns.
        norm_by_std: Whether to divide by standard deviations.
        eps: Added to them.

    Returns:
        For each trajectory the advantages of its turns, float32 of shape [turns].

    Raises:
        TrainError: Numbers of turns differ, shapes differ, or a number is not finite.
    """
    if [len(each) for each in step_returns] != [len(each) for each in anchors] or len(anchors) != len(rewards):
        raise TrainError("step_returns and anchors must have one element for each turn of each of the rewards")
    episodes = Groups.of(rewards, groups)
    whole = _scaled(episodes, norm_by_std, eps)
    if not any(len(each) for each in anchors):
        return [torch.zeros(0) for _ in anchors]
    names: dict[Hashable, int] = {}
    states = [
        names.setdefault((int(group), anchor), len(names))
        for group, mine in zip(groups, anchors, strict=True)
        for anchor in mine
    ]
    steps = Groups.of(torch.cat([each.double() for each in step_returns]), torch.tensor(states))
    turns = torch.split(_scaled(steps, norm_by_std, eps), [len(each) for each in anchors])
    compared = episodes.size[episodes.member] > 1
    return [(each + omega * turn).float() * several for each, turn, several in zip(whole, turns, compared, strict=True)]


def _scaled(found: Groups, norm_by_std: bool, eps: float) -> Tensor:
    values = found.centred / (found.std[found.member] + eps) if norm_by_std else found.centred
    return values.masked_fill(found.dead[found.member], 0.0)


def _steps(rewards: Tensor, values: Tensor, mask: Tensor | None) -> list[int]:
    kept = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    if rewards.ndim != 1 or not rewards.shape == values.shape == kept.shape:
        shapes = [tuple(each.shape) for each in (rewards, values, kept)]
        raise TrainError(f"rewards, values and mask have shapes {shapes}; all must be [T]")
    if bool((rewards[~kept] != 0).any()):
        place = int(torch.nonzero(~kept & (rewards != 0))[0])
        raise TrainError(
            f"rewards[{place}] is {float(rewards[place])}, but nothing was sampled there: note it on a turn"
        )
    found: list[int] = torch.nonzero(kept).flatten().tolist()
    return found
