"""How far trainer and inference server lie apart.

Owns: :func:`logprob_gap`. Refuses: correcting for it (``correction.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.trainer.losses.core import MAX_LOG_RATIO, LossSums


def logprob_gap(trainer: Tensor, rollout: Tensor) -> LossSums:
    """How far the trainer's log-probabilities lie from the inference server's, on equal weights and ids.

    Args:
        trainer: Shape [N].
        rollout: Shape [N].

    Returns:
        No loss (0); the sums ``gap_abs`` (``|trainer - rollout|``) and ``gap_kl`` (k3 estimate of
        KL(rollout || trainer) on the sampled tokens); the maximum ``gap_max``.
    """
    with torch.no_grad():
        difference = (trainer - rollout).float()
        magnitude = difference.abs()
        log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        sums = {"gap_abs": magnitude.sum(), "gap_kl": (torch.expm1(log_ratio) - log_ratio).sum()}
        maxima = {"gap_max": magnitude.max() if magnitude.numel() else difference.new_tensor(0.0)}
        return LossSums(difference.new_tensor(0.0), sums, maxima)
