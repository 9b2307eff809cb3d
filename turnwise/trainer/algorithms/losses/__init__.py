"""Losses: pure functions of tensors that return sums, and the registry of policy losses.

A policy loss takes ``logprobs, old_logprobs, advantages, weights``, each of shape [N], and by keyword its options and
the :data:`LOSS_DATA` that it names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from turnwise.plugins import register_entry
from turnwise.trainer.algorithms.losses.core import LossAggregation, LossSums
from turnwise.trainer.algorithms.losses.policy import (
    cispo_loss,
    clip_cov_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    dro_loss,
    gmpo_loss,
    gpg_loss,
    gspo_loss,
    kl_cov_loss,
    ppo_clip_loss,
    sapo_loss,
    select_clip_cov,
    select_kl_cov,
)
from turnwise.trainer.algorithms.registry import find

LossFn: TypeAlias = Callable[..., LossSums]
SelectFn: TypeAlias = Callable[..., Tensor]

LOSS_ARGUMENTS = ("logprobs", "old_logprobs", "advantages", "weights")
LOSS_DATA = ("sequences", "turns", "rollout_logprobs", "entropy", "selected")
"""What a loss may ask for by name, each of shape [N]: the number of each token's row and turn in the micro-batch, what
the server reported, the entropy of the distribution, and what ``select`` chose."""

SELECT_ARGUMENTS = ("old_logprobs", "advantages")
SELECT_DATA = ("seed",)


@dataclass(frozen=True, slots=True)
class Loss:
    """A policy loss and its properties.

    Attributes:
        function: The formula.
        aggregation: Default of ``algorithm.loss_aggregation``.
        select: Selects tokens of a whole optimizer step before its first pass, from the old policy's log-probabilities
            and the advantages; passed to the loss as ``selected``.
        idle_at_zero: Whether a row whose advantages are all zero has no gradient and can be skipped.
        uses_ratio: Whether tokens are weighted by their ratio to the old policy.
    """

    function: LossFn
    aggregation: LossAggregation = "token_mean"
    select: SelectFn | None = None
    idle_at_zero: bool = True
    uses_ratio: bool = True


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(ppo_clip_loss),
    "gspo": Loss(gspo_loss, "seq_mean_token_mean"),
    "cispo": Loss(cispo_loss),
    "sapo": Loss(sapo_loss, "seq_mean_token_mean"),
    "gmpo": Loss(gmpo_loss, "seq_mean_token_mean"),
    "gpg": Loss(gpg_loss, uses_ratio=False),
    "clip_cov": Loss(clip_cov_loss, select=select_clip_cov),
    "kl_cov": Loss(kl_cov_loss, select=select_kl_cov, idle_at_zero=False),
    "dppo_tv": Loss(dppo_tv_loss),
    "dppo_kl": Loss(dppo_kl_loss),
    "dro": Loss(dro_loss, idle_at_zero=False, uses_ratio=False),
}
"""Losses by the name that a configuration uses."""


F = TypeVar("F", bound=Callable[..., Any])


def register_loss(
    name: str,
    *,
    aggregation: LossAggregation = "token_mean",
    select: SelectFn | None = None,
    idle_at_zero: bool = False,
    uses_ratio: bool = True,
) -> Callable[[F], F]:
    """Return a decorator that registers a policy loss for ``algorithm.loss``.

    It is called with :data:`LOSS_ARGUMENTS` and the part of :data:`LOSS_DATA` that it names. The other arguments are
    those of :class:`Loss`. The decorator raises RegistryError where the name is taken by another loss.
    """

    def register(function: F) -> F:
        entry = Loss(function, aggregation, select, idle_at_zero, uses_ratio)
        register_entry(name, entry, LOSSES, "loss", of=lambda loss: loss.function)
        return function

    return register


def find_loss(name: str) -> Loss:
    """Return a loss by its name or by reference (``pkg.mod:function``, ``path/file.py:function``).

    Raises:
        RegistryError: No such loss, or the reference is no function.
    """
    loss: Any = find(name, LOSSES, "algorithm.loss")
    return loss if isinstance(loss, Loss) else Loss(loss, idle_at_zero=False)
