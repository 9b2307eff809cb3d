from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.trainer.algorithms.losses import ppo_clip_loss
from turnwise.trainer.algorithms.losses.core import cross_entropy_loss, entropy_bonus, logprob_gap

LN2 = math.log(2.0)


def ppo(ratios: list[float], advantages: list[float], weights: list[float] | None = None, **options: float | None):
    """Loss and gradient for tokens whose ratio is given (old logprob -1)."""
    logprobs = (torch.tensor(ratios, dtype=torch.float64).log() - 1.0).requires_grad_()
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    w = torch.tensor(weights or [1.0] * len(ratios), dtype=torch.float64)
    settings = {"clip_low": 0.2, "clip_high": 0.3, **options}
    result = ppo_clip_loss(logprobs, old, torch.tensor(advantages, dtype=torch.float64), w, **settings)  # type: ignore[arg-type]
    result.loss.backward()
    assert logprobs.grad is not None
    return result, logprobs.grad.tolist()


def test_ratio_one_is_the_plain_policy_gradient() -> None:
    # L = -A r, dL/dlogp = -A r = -A at r = 1.
    result, grad = ppo([1.0, 1.0], [2.0, -3.0], [1.0, 0.5])
    assert result.loss.item() == pytest.approx(-2.0 + 1.5)
    assert grad == pytest.approx([-2.0, 1.5])
    assert result.sums["clip_fraction"] == 0
    assert result.sums["approx_kl"].item() == pytest.approx(0.0)


def test_clipping_by_hand() -> None:
    # Bounds 0.8 and 1.3. Per token, L = max(-A r, -A clip(r)):
    #  r 2.0, A +1: max(-2, -1.3)   = -1.3, clipped, gradient 0
    #  r 2.0, A -1: max(2, 1.3)     =  2.0, not clipped, gradient -A r = 2
    #  r 0.5, A +1: max(-0.5, -0.8) = -0.5, not clipped, gradient -0.5
    #  r 0.5, A -1: max(0.5, 0.8)   =  0.8, clipped, gradient 0
    #  r 1.1, A +2: within bounds   = -2.2, gradient -2.2
    result, grad = ppo([2.0, 2.0, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0])
    assert result.loss.item() == pytest.approx(-1.3 + 2.0 - 0.5 + 0.8 - 2.2)
    assert grad == pytest.approx([0.0, 2.0, -0.5, 0.0, -2.2])
    assert result.sums["clip_fraction"].item() == 2
    assert result.sums["ratio"].item() == pytest.approx(6.1)
    assert result.maxima["ratio_max"].item() == pytest.approx(2.0)
    # k3 = r - 1 - ln r
    k3 = sum(r - 1 - math.log(r) for r in (2.0, 2.0, 0.5, 0.5, 1.1))
    assert result.sums["approx_kl"].item() == pytest.approx(k3)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    # A -1, r 5: max(5, 1.3) = 5, bounded by 3: gradient 0. A +1, r 5: clipped at -1.3 as ever. A -1, r 2: 2 stays.
    result, grad = ppo([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0], dual_clip=3.0)
    assert result.loss.item() == pytest.approx(3.0 - 1.3 + 2.0)
    assert grad == pytest.approx([0.0, 0.0, 2.0])
    assert result.sums["dual_clip_fraction"].item() == 1
    unbounded, _ = ppo([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0])
    assert unbounded.loss.item() == pytest.approx(5.0 - 1.3 + 2.0)


def test_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -300.0], requires_grad=True)
    result = ppo_clip_loss(
        logprobs, torch.tensor([-300.0, 0.0]), torch.tensor([-1.0, 1.0]), torch.ones(2), clip_low=0.2, clip_high=0.2
    )
    # Clamped at 20: exp(20) = 4.85e8, exp(-20) = 2.06e-9.
    assert result.loss.item() == pytest.approx(math.exp(20) - math.exp(-20), rel=1e-5)
    result.loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


@given(
    tokens=st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2), st.floats(0, 2)), min_size=1, max_size=12),
    split=st.integers(0, 12),
)
def test_sums_add_up_over_any_split(tokens: list[tuple[float, float, float]], split: int) -> None:
    log_ratio, advantage, weight = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))

    def loss(part: slice) -> float:
        old = torch.zeros_like(log_ratio[part])
        return ppo_clip_loss(
            log_ratio[part], old, advantage[part], weight[part], clip_low=0.2, clip_high=0.28, dual_clip=3.0
        ).loss.item()

    assert loss(slice(0, split)) + loss(slice(split, None)) == pytest.approx(loss(slice(None)), abs=1e-9)


def test_cross_entropy_and_entropy() -> None:
    logprobs = torch.tensor([-LN2, -2 * LN2], requires_grad=True)
    result = cross_entropy_loss(logprobs, torch.tensor([1.0, 0.5]))
    assert result.loss.item() == pytest.approx(2 * LN2)
    assert result.sums["nll"].item() == pytest.approx(3 * LN2)
    result.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, -0.5]
    assert entropy_bonus(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.5]), 0.1).item() == pytest.approx(-0.25)


def test_gap_by_hand() -> None:
    result = logprob_gap(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5]))
    assert result.sums["gap_abs"].item() == pytest.approx(0.5)
    assert result.maxima["gap_max"].item() == pytest.approx(0.5)
    # k3 of trainer over rollout on the second token: e^0.5 - 1 - 0.5.
    assert result.sums["gap_kl"].item() == pytest.approx(math.exp(0.5) - 1.5, rel=1e-5)
