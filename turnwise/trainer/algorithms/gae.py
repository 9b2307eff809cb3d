"""Generalised advantage estimation of a trajectory's tokens or turns, from the values of a critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]


def gae(
    rewards: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 1.0, last_value: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation of one row, over its time steps (sampled tokens, or turns).

    ``delta_t = r_t + gamma V_(t+1) - V_t``, ``A_t = delta_t + gamma lam A_(t+1)``, returns ``A_t + V_t``: Schulman et
    al. 2015 (arXiv:1506.02438), eq. 16.

    Args:
        rewards: Shape [T].
        values: Shape [T].
        gamma: Discount per time step.
        lam: GAE lambda (0: one step, 1: Monte Carlo).
        last_value: Bootstrap value after the end: 0 where the episode terminated, the critic's where it was truncated.

    Returns:
        Advantages and returns, each of shape [T].
    """
    # Lists, not tensors: reading an element of a tensor costs ten times the arithmetic.
    earned, expected = rewards.tolist(), values.tolist()
    advantages, returns = [0.0] * len(earned), [0.0] * len(earned)
    ahead, following = 0.0, last_value
    for index in range(len(earned) - 1, -1, -1):
        value = expected[index]
        ahead = earned[index] + gamma * following - value + gamma * lam * ahead
        advantages[index], returns[index] = ahead, ahead + value
        following = value
    return torch.tensor(advantages, dtype=values.dtype), torch.tensor(returns, dtype=values.dtype)


def whitened(values: Tensor, *, shift: bool = True, eps: float = 1e-8) -> Tensor:
    """Return ``(x - mean) / sqrt(var + eps)`` with the unbiased variance, ``sum (x - mean)^2 / (n - 1)``.

    With ``shift``, a single element and equal ones become 0; without, the mean is not subtracted, but the variance is
    still around it.
    """
    if not values.numel():
        return torch.zeros_like(values)
    mean = values.mean()
    variance = (values - mean).square().sum() / max(1, len(values) - 1)
    return (values - mean if shift else values) * (variance + eps).rsqrt()


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages and critic targets of one trajectory's n sampled tokens.

    Attributes:
        advantages: float32 of shape [n].
        returns: float32 of shape [n], targets of the critic; 0 where ``valued`` is false.
        valued: bool of shape [n], tokens that the critic is trained on.
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
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
    value_lam: Fraction | None = None,
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
        rewards: Per trajectory float of shape [n], of its sampled tokens in sampling order.
        values: Per trajectory shape [n], the critic's values before these tokens.
        turns: Per trajectory int64 of shape [n], the turn of each token; non-decreasing.
        last_values: Per trajectory the bootstrap value: 0 where the episode terminated.
        gamma: Discount per token (turn).
        lam: Lambda of advantages: 0 one step, 1 Monte Carlo.
        value_lam: Lambda of the critic's targets; None is ``lam``.
        level: Unit of time.
        whiten: Whether to normalise advantages to mean 0 and (unbiased) variance 1 over all tokens of the batch.
    """
    estimates: list[TokenAdvantages] = []
    for reward, value, turn, last_value in zip(rewards, values, turns, last_values, strict=True):
        first = torch.ones_like(turn, dtype=torch.bool)
        step = torch.arange(len(turn))
        if level == "turn":
            first[1:] = turn.diff() != 0
            step = first.long().cumsum(0) - 1
        earned = reward.new_zeros(int(first.sum())).index_add(0, step, reward)
        expected = value[first]
        advantages, targets = gae(earned, expected, gamma=gamma, lam=lam, last_value=last_value)
        if value_lam is not None:
            targets = gae(earned, expected, gamma=gamma, lam=value_lam, last_value=last_value)[1]
        estimates.append(TokenAdvantages(advantages[step].float(), targets[step].float() * first, first))
    if not (whiten and estimates):
        return estimates
    together = whitened(torch.cat([estimate.advantages for estimate in estimates]).double()).float()
    parts = torch.split(together, [len(estimate.advantages) for estimate in estimates])
    return [
        TokenAdvantages(part, estimate.returns, estimate.valued)
        for part, estimate in zip(parts, estimates, strict=True)
    ]


CRITIC_ARGUMENTS = ("rewards", "values", "turns", "last_values")
CRITIC_ADVANTAGES: dict[str, Callable[..., list[TokenAdvantages]]] = {"gae": critic_gae}
"""Estimators that read the values of a critic, by the name that a configuration uses."""
