"""Advantages of tokens from what a critic expects of them.

Owns: :func:`critic_gae`, which is ``algorithm.advantage: gae``, and :func:`token_rewards`. Refuses: the critic itself
(``trainer/critic.py``), and trajectories; callers hand in the sampled tokens of each in the order of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trainer.advantages.core import whitened
from turnwise.trainer.advantages.temporal import gae

Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """What the sampled tokens of one trajectory are told, and what its critic is.

    Attributes:
        advantages: float32 of shape [n].
        returns: float32 of shape [n], what the critic should have said; 0 where ``valued`` is false.
        valued: bool of shape [n], the tokens before which the critic is asked.
    """

    advantages: Tensor
    returns: Tensor
    valued: Tensor


def critic_gae(
    rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    turns: Sequence[Tensor],
    last_values: Sequence[float],
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    value_lam: Share | None = None,
    level: Literal["token", "turn"] = "token",
    whiten: bool = True,
) -> list[TokenAdvantages]:
    """Generalised advantage estimates of a batch of trajectories.

    ``delta_t = r_t + gamma V_(t+1) - V_t``, ``A_t = delta_t + gamma lam A_(t+1)``: Schulman et al. 2015
    (arXiv:1506.02438), eq. 16. At ``level`` ``token`` t counts sampled tokens: observations between them are no steps.
    At ``turn`` it counts turns, as in Li et al. 2025, Turn-PPO (arXiv:2512.17008): one value per turn, before its first
    token, the rewards of its tokens summed, and one advantage for all of them. Returns are ``A_t + V_t``, with
    ``value_lam`` in place of ``lam`` where it is given: Yuan et al. 2025, VC-PPO (arXiv:2503.01491), decoupled GAE.

    Args:
        rewards: For each trajectory float of shape [n], of its sampled tokens in the order of time.
        values: For each shape [n], what the critic expected before each of these tokens.
        turns: For each int64 of shape [n], the number of each token's turn; never falling.
        last_values: For each what is to come after its end: 0 where the episode ended there.
        gamma: Discount from one token (turn) to the next.
        lam: How far advantages reach: 0 one step, 1 to the end.
        value_lam: How far the critic's targets reach; None is ``lam``.
        level: What a step in time is.
        whiten: Whether advantages are moved to mean 0 and scaled to (unbiased) variance 1 over all tokens of the batch.

    Raises:
        TrainError: Shapes differ, or turns fall.
    """
    found: list[TokenAdvantages] = []
    for reward, value, turn, last in zip(rewards, values, turns, last_values, strict=True):
        if reward.ndim != 1 or not reward.shape == value.shape == turn.shape:
            shapes = [tuple(each.shape) for each in (reward, value, turn)]
            raise TrainError(f"rewards, values and turns of a trajectory have shapes {shapes}; all must be [n]")
        if bool((turn.diff() < 0).any()):
            raise TrainError(f"turns are {turn.tolist()}: they must be in the order of time")
        first = torch.ones_like(turn, dtype=torch.bool)
        step = torch.arange(len(turn))
        if level == "turn":
            first[1:] = turn.diff() != 0
            step = first.long().cumsum(0) - 1
        earned = reward.new_zeros(int(first.sum())).index_add(0, step, reward)
        expected = value[first]
        advantages, targets = gae(earned, expected, gamma=gamma, lam=lam, last_value=last)
        if value_lam is not None:
            targets = gae(earned, expected, gamma=gamma, lam=value_lam, last_value=last)[1]
        found.append(TokenAdvantages(advantages[step].float(), targets[step].float() * first, first))
    if not (whiten and found):
        return found
    together = whitened(torch.cat([each.advantages for each in found]).double()).float()
    parts = torch.split(together, [len(each.advantages) for each in found])
    return [TokenAdvantages(part, each.returns, each.valued) for part, each in zip(parts, found, strict=True)]


def token_rewards(rewards: Tensor, turns: Tensor) -> Tensor:
    """Lay the rewards of turns on their last sampled token, shape [turns], [n] -> [n].

    The reward of a turn of which no token is trained goes to the last token before it; where there is none before, no
    trained token led to it, and it is left out.

    Args:
        rewards: Shape [turns].
        turns: int64 of shape [n], the number of each token's turn; never falling.
    """
    found = torch.zeros(len(turns), dtype=torch.float64)
    # How many tokens there are up to the end of each turn; the last of them is one before that.
    ends = torch.searchsorted(turns.contiguous(), torch.arange(len(rewards)), right=True) - 1
    reached = ends >= 0
    return found.index_add(0, ends[reached], rewards.double()[reached])
