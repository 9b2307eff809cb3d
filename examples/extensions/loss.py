r"""A policy loss for data that is some steps old: tapered off-policy REINFORCE (TOPR).

algorithm: {loss: loss.py:tapered, loss_options: {most: 1.0}}
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from turnwise import register_loss
from turnwise.trainer.algorithms.losses import LossSums
from turnwise.trainer.algorithms.losses.core import bounded_log_ratio, ratio_sums


@register_loss("tapered", uses_ratio=True)
def tapered(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    sequences: Tensor,
    most: Annotated[float, Field(gt=0)] = 1.0,
) -> LossSums:
    """Return the loss of N tokens; all tensors have shape [N].

    ``L_t = -c_t * A_t * log p_t``. ``c_t`` is 1 for advantages of at least 0, and ``min(ratio, most)`` below, with the
    ratio of the whole sequence to the policy that sampled it, without gradient: what was good is learned from whoever
    sampled it, what was bad only as far as the policy still does it. Le Roux et al. 2025 (arXiv:2503.14286), with
    advantages in the place of rewards.

    Returns:
        The loss, the sums that all losses report, and ``taper``, the mean of ``c_t``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    with torch.no_grad():
        count = int(sequences.max()) + 1 if sequences.numel() else 0
        whole = log_ratio.new_zeros(count).index_add(0, sequences, log_ratio)[sequences]
        ratio = whole.clamp(-20.0, 20.0).exp()
        taper = torch.where(advantages < 0, ratio.clamp(max=most), torch.ones_like(ratio))
    sums, maxima = ratio_sums(log_ratio.detach(), ratio)
    sums["taper"] = taper.sum()
    return LossSums((weights * -advantages * taper * logprobs).sum(), sums, maxima)
