"""KL estimators by hand: values, gradients, straight-through forms, and the adaptive coefficient."""

from __future__ import annotations

import math
import re

import pytest
import torch

from turnwise.trainer.algorithms.kl import KL_ESTIMATORS, MAX_K3, adapted_coef, kl_estimate, kl_penalty

E = math.e


# log p = -1, log p_ref = -2 and -0.5: log p - log p_ref = 1 and -0.5.
@pytest.mark.parametrize(
    ("name", "values", "gradients"),
    [
        ("k1", [1.0, -0.5], [1.0, 1.0]),
        ("abs", [1.0, 0.5], [1.0, -1.0]),
        ("k2", [0.5, 0.125], [1.0, -0.5]),
        # e^-1 - 1 + 1 and e^0.5 - 1 - 0.5; derivative 1 - e^(ref - log p).
        ("k3", [1 / E, math.sqrt(E) - 1.5], [1 - 1 / E, 1 - math.sqrt(E)]),
        ("k1+", [1.0, -0.5], [1.0, -0.5]),
        ("abs+", [1.0, 0.5], [1.0, -0.5]),
        ("k2+", [0.5, 0.125], [1.0, -0.5]),
        ("k3+", [1 / E, math.sqrt(E) - 1.5], [1.0, -0.5]),
    ],
)
def test_values_and_gradients(name: str, values: list[float], gradients: list[float]) -> None:
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(name, logprobs, torch.tensor([-2.0, -0.5], dtype=torch.float64))
    assert estimate.tolist() == pytest.approx(values)
    estimate.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradients)


@pytest.mark.parametrize("name", [*KL_ESTIMATORS, "k3+"])
def test_reference_is_cut_off_from_the_gradients(name: str) -> None:
    logprobs, reference = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    kl_estimate(name, logprobs, reference).sum().backward()
    assert reference.grad is None
    assert logprobs.grad is not None


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    logprobs = torch.tensor([-1.0, -0.3, -4.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.7, -0.1, -3.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(name, x, reference), (logprobs,))


def test_extreme_log_ratios_are_bounded() -> None:
    logprobs = torch.tensor([-300.0, 0.0], requires_grad=True)
    value = kl_estimate("k3", logprobs, torch.tensor([0.0, -300.0]))
    # The first is cut off at 10; the second is e^-20 - 1 + 20.
    assert value.tolist() == pytest.approx([MAX_K3, 10.0])
    assert torch.isfinite(kl_estimate("k2", logprobs, torch.zeros(2))).all()


def test_k1_and_k3_are_unbiased_over_a_distribution() -> None:
    """Summed over all tokens of a vocabulary of three, weighted by p, both are the divergence itself."""
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = 0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3)
    for name in ("k1", "k3", "k3+"):
        assert (p * kl_estimate(name, p.log(), q.log())).sum().item() == pytest.approx(exact)


def test_the_penalty_is_weighted_and_reported_unweighted() -> None:
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference, weights = torch.tensor([-2.0, -0.5], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    result = kl_penalty(logprobs, reference, weights, estimator="k2", coef=0.1)
    assert result.loss.item() == pytest.approx(0.1 * (0.5 + 2 * 0.125))
    assert result.sums["kl"].item() == pytest.approx(0.625)


def test_the_adaptive_coefficient() -> None:
    # Twice the target: the error is cut off at 0.2; 0.1 * (1 + 0.2 * 10 / 100). Nine tenths of it: -0.1.
    assert adapted_coef(0.1, 0.2, target=0.1, horizon=100, count=10) == pytest.approx(0.102)
    assert adapted_coef(0.1, 0.09, target=0.1, horizon=100, count=10) == pytest.approx(0.099)
    assert adapted_coef(0.1, -5.0, target=0.1, horizon=100, count=50) == pytest.approx(0.09)
    # More trajectories in a step than the horizon has: a fifth at most, and never to the other side of zero.
    assert adapted_coef(0.1, -5.0, target=0.1, horizon=10, count=1000) == pytest.approx(0.08)


def test_estimators_name_their_paper() -> None:
    for name, function in KL_ESTIMATORS.items():
        assert re.search(r"Schulman.*joschu\.net", function.__doc__ or "", re.DOTALL), name
