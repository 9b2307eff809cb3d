"""Losses of preference pairs, for policies (DPO, IPO, RPO) and reward models.

With ``s_c`` and ``s_r`` the log-probabilities of the chosen and the rejected completion (sums over their tokens, or
means where lengths are normalised), policy losses read ``margins``: ``(s_c - ref_c) - (s_r - ref_r)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody reads
from torch import Tensor

from turnwise.trainer.algorithms.losses.core import LossSums


def pair_sums(values: Tensor, sides: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Sum values by pair and side: ``sides`` is ``2 * pair`` for chosen and ``2 * pair + 1`` for rejected ones.

    Returns:
        The sums, and the number of values in each; both of shape [pairs, 2], chosen first.
    """
    sums = values.new_zeros(2 * pairs).index_add(0, sides, values)
    counts = torch.bincount(sides, minlength=2 * pairs)
    return sums.view(pairs, 2), counts.view(pairs, 2)


def dpo_loss(margins: Tensor, *, beta: float, label_smoothing: float = 0.0) -> LossSums:
    """Direct preference optimisation: ``-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)``, summed over pairs.

    Rafailov et al. 2023, Direct Preference Optimization (arXiv:2305.18290), eq. 7; with ``label_smoothing`` e the
    conservative form of its section "cDPO" (Mitchell 2023).

    Args:
        margins: Shape [P]; gradients flow through it.
        beta: Strength of the pull to the reference.
        label_smoothing: Assumed share of wrong labels, in [0, 0.5).
    """
    h = beta * margins
    loss = -(1.0 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)
    return LossSums(loss.sum(), _pair_metrics(h))


def ipo_loss(margins: Tensor, *, beta: float) -> LossSums:
    """Identity preference optimisation: ``(m - 1 / (2 beta))^2``, summed over P pairs.

    Azar et al. 2023, A General Theoretical Paradigm to Understand Learning from Human Preferences (arXiv:2310.12036),
    eq. 17, with beta for tau: margins converge to a finite value even for deterministic preferences.
    """
    return LossSums((margins - 0.5 / beta).square().sum(), _pair_metrics(beta * margins))


def rpo_term(chosen: Tensor, lengths: Tensor, *, coef: float) -> Tensor:
    """Return ``-coef * sum(s_c / |y_c|)``: the chosen completions' likelihood, to be added to a loss of pairs.

    Pang et al. 2024, Iterative Reasoning Preference Optimization (arXiv:2404.19733), eq. 1. ``chosen`` are summed
    log-probabilities and ``lengths`` their tokens, both of shape [P].
    """
    return -coef * (chosen / lengths).sum()


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margins: Tensor, *, center_coef: float = 0.0) -> LossSums:
    """Reward model: ``-log sigmoid(r_c - r_r - m) + c (r_c + r_r)^2``, summed over pairs.

    Ouyang et al. 2022, InstructGPT (arXiv:2203.02155), eq. 1; the margin m is that of Touvron et al. 2023, Llama 2
    (arXiv:2307.09288), eq. 2; the second term, which keeps rewards around 0, that of Eisenstein et al. 2023, Helping or
    Herding? (arXiv:2312.09244), section 2.

    Args:
        chosen: Rewards, shape [P]; gradients flow through it.
        rejected: Rewards, shape [P]; gradients flow through it.
        margins: Minimal difference of rewards, shape [P].
        center_coef: The weight c.
    """
    difference = chosen - rejected
    loss = -F.logsigmoid(difference - margins) + center_coef * (chosen + rejected).square()
    return LossSums(loss.sum(), _pair_metrics(difference))


def _pair_metrics(difference: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"accuracy": (difference > 0).to(difference.dtype).sum(), "margin": difference.sum()}
