"""Losses of pairs against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from turnwise.trainer.algorithms.losses.preference import bradley_terry_loss, dpo_loss, ipo_loss, pair_sums, rpo_term

# With m = ln 3 and beta 1: sigmoid(ln 3) = 3/4 and sigmoid(-ln 3) = 1/4.
LN3, LN4 = math.log(3.0), math.log(4.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_dpo_by_hand() -> None:
    # -ln(3/4) = ln 4 - ln 3, and -ln(1/4) = ln 4 for the pair that is the wrong way round.
    pair_loss = dpo_loss(tensor(LN3, -LN3), beta=1.0)
    assert float(pair_loss.loss) == pytest.approx((LN4 - LN3) + LN4)
    assert float(pair_loss.sums["accuracy"]) == 1.0
    assert float(pair_loss.sums["margin"]) == pytest.approx(0.0)
    # Half the beta on twice the margin is the same.
    assert float(dpo_loss(tensor(2 * LN3), beta=0.5).loss) == pytest.approx(LN4 - LN3)
    # Policy and reference equal: ln 2, no pair is right, and the gradient is -beta / 2.
    margins = tensor(0.0).requires_grad_()
    start = dpo_loss(margins, beta=0.1)
    start.loss.backward()
    assert float(start.loss.detach()) == pytest.approx(math.log(2.0))
    assert float(start.sums["accuracy"]) == 0.0
    assert margins.grad is not None
    assert margins.grad.item() == pytest.approx(-0.05)


def test_conservative_dpo_by_hand() -> None:
    # 0.9 (ln 4 - ln 3) + 0.1 ln 4.
    pair_loss = dpo_loss(tensor(LN3), beta=1.0, label_smoothing=0.1)
    assert float(pair_loss.loss) == pytest.approx(LN4 - 0.9 * LN3)
    # Its minimum is where sigmoid(beta m) = 0.9.
    best = tensor(math.log(9.0)).requires_grad_()
    dpo_loss(best, beta=1.0, label_smoothing=0.1).loss.backward()
    assert best.grad is not None
    assert best.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_ipo_by_hand() -> None:
    # 1 / (2 beta) = 5: (7 - 5)^2 + (5 - 5)^2.
    assert float(ipo_loss(tensor(7.0, 5.0), beta=0.1).loss) == pytest.approx(4.0)
    assert float(ipo_loss(tensor(7.0, 5.0), beta=0.1).sums["margin"]) == pytest.approx(1.2)


def test_rpo_term_by_hand() -> None:
    # -0.5 (-6/3 + -2/4).
    assert float(rpo_term(tensor(-6.0, -2.0), torch.tensor([3, 4]), coef=0.5)) == pytest.approx(1.25)


def test_bradley_terry_by_hand() -> None:
    pair_loss = bradley_terry_loss(tensor(LN3 + 2.0, 0.0), tensor(2.0, LN3), tensor(0.0, 0.0))
    assert float(pair_loss.loss) == pytest.approx((LN4 - LN3) + LN4)
    assert (float(pair_loss.sums["accuracy"]), float(pair_loss.sums["margin"])) == (1.0, pytest.approx(0.0))
    # A margin of ln 3 makes a difference of ln 3 a draw; 0.1 (ln 3 + 2 + 2)^2 draws both to 0.
    centred = bradley_terry_loss(tensor(LN3 + 2.0), tensor(2.0), tensor(LN3), center_coef=0.1)
    assert float(centred.loss) == pytest.approx(math.log(2.0) + 0.1 * (LN3 + 4.0) ** 2)


def test_extreme_margins_stay_finite() -> None:
    margins = tensor(1e4, -1e4).requires_grad_()
    pair_loss = dpo_loss(margins, beta=1.0, label_smoothing=0.1)
    pair_loss.loss.backward()
    assert math.isfinite(float(pair_loss.loss.detach()))
    assert margins.grad is not None
    assert torch.isfinite(margins.grad).all()


def test_gradients_are_those_of_the_formulas() -> None:
    x = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    lengths = torch.tensor([1, 2, 3, 4, 5])
    assert torch.autograd.gradcheck(lambda m: dpo_loss(m, beta=0.7, label_smoothing=0.2).loss, (x,))
    assert torch.autograd.gradcheck(lambda m: ipo_loss(m, beta=0.7).loss, (x,))
    assert torch.autograd.gradcheck(lambda c: rpo_term(c, lengths, coef=0.3), (x,))
    margins = torch.full((5,), 0.3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry_loss(c, r, margins, center_coef=0.1).loss, (x, y))


def test_sums_by_side() -> None:
    # Pair 0: chosen 1 + 2, rejected 4; pair 1: chosen 8, rejected 16 + 32.
    values = tensor(4.0, 1.0, 2.0, 16.0, 8.0, 32.0)
    sums, counts = pair_sums(values, torch.tensor([1, 0, 0, 3, 2, 3]), 2)
    assert sums.tolist() == [[3.0, 4.0], [8.0, 48.0]]
    assert counts.tolist() == [[2, 1], [1, 2]]
