"""Every policy loss against numbers worked out by hand: values, gradients, what is clipped, extreme ratios."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from torch import Tensor

from turnwise.trainer.algorithms.losses import LOSSES, LossSums, ppo_clip_loss, select_clip_cov, select_kl_cov
from turnwise.trainer.algorithms.losses.core import span_mean
from turnwise.trainer.algorithms.losses.policy import covariance

LN2 = math.log(2.0)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss(
    name: str,
    ratios: list[float],
    advantages: list[float],
    weights: list[float] | None = None,
    old: list[float] | None = None,
    **options: object,
) -> tuple[LossSums, list[float]]:
    """The loss and its gradient for tokens whose ratio to the old policy is given (old log-probabilities -1)."""
    was = numbers(*(old or [-1.0] * len(ratios)))
    logprobs = (numbers(*ratios).log() + was).requires_grad_()
    w = numbers(*(weights or [1.0] * len(ratios)))
    result = LOSSES[name].function(logprobs, was, numbers(*advantages), w, **options)
    result.loss.backward()
    assert logprobs.grad is not None
    return result, logprobs.grad.tolist()


def test_gspo_clips_the_geometric_mean_of_a_sequence() -> None:
    # Sequence 0: ratios 4 and 1, mean of logs ln 2, s = 2; A = 1: max(-2, -1.3) = -1.3 on both tokens, no gradient.
    # Sequence 1: ratios 1/4 and 1, s = 1/2; A = 2: max(-1, -1.6) = -1 on both, gradient -A s = -1 on each.
    # Sequence 2: one token, ratio 2, A = -1: max(2, 1.3) = 2, gradient 2. Weights 1/2, 1/2, 1/2, 1/2, 1.
    result, grad = loss(
        "gspo",
        [4.0, 0.25, 1.0, 1.0, 2.0],
        [1.0, 2.0, 1.0, 2.0, -1.0],
        [0.5, 0.5, 0.5, 0.5, 1.0],
        sequences=torch.tensor([0, 1, 0, 1, 2]),
        clip_low=0.2,
        clip_high=0.3,
    )
    assert result.loss.item() == pytest.approx(-1.3 - 1.0 + 2.0)
    assert grad == pytest.approx([0.0, -0.5, 0.0, -0.5, 2.0])
    assert result.sums["clip_fraction"].item() == 2
    assert result.sums["ratio"].item() == pytest.approx(2 + 0.5 + 2 + 0.5 + 2)
    assert result.maxima["ratio_max"].item() == pytest.approx(2.0)


def test_gspo_is_the_derivative_of_the_sequence_objective() -> None:
    """With one advantage per sequence and seq-mean weights: finite differences of -A s_i, written out here."""
    sequences = [[0, 1, 2], [3, 4]]
    advantages, old = [1.5, -0.5], [-1.0, -2.0, -0.5, -3.0, -1.0]
    point = [-1.1, -1.9, -0.45, -3.05, -0.9]

    def objective(logprobs: list[float]) -> float:
        total = 0.0
        for number, tokens in enumerate(sequences):
            s = math.exp(sum(logprobs[t] - old[t] for t in tokens) / len(tokens))
            total += max(-advantages[number] * s, -advantages[number] * min(max(s, 0.8), 1.28))
        return total

    slopes = []
    for token in range(5):
        up, down = list(point), list(point)
        up[token] += 1e-6
        down[token] -= 1e-6
        slopes.append((objective(up) - objective(down)) / 2e-6)
    ratios = [math.exp(new - was) for new, was in zip(point, old, strict=True)]
    result, grad = loss(
        "gspo", ratios, [1.5] * 3 + [-0.5] * 2, [1 / 3] * 3 + [0.5] * 2, old,
        sequences=torch.tensor([0, 0, 0, 1, 1]), clip_low=0.2, clip_high=0.28,
    )  # fmt: skip
    assert result.loss.item() == pytest.approx(objective(point))
    assert grad == pytest.approx(slopes, abs=1e-8)


def test_gmpo_clips_tokens_then_takes_the_geometric_mean() -> None:
    # Bounds e^-1 and e^1. Ratios 4 and 1/2. A = 1: logs min(1.386, 1) = 1 and -0.693, G = sqrt(e / 2) = 1.1658219;
    # the first token is clipped, the second has gradient -G / 2. A = -1: nothing is clipped from above, G = sqrt(2),
    # gradient sqrt(2) / 2 on both.
    result, grad = loss(
        "gmpo", [4.0, 0.5, 4.0, 0.5], [1.0, 1.0, -1.0, -1.0], [0.5] * 4,
        sequences=torch.tensor([0, 0, 1, 1]), clip_low=1.0, clip_high=1.0,
    )  # fmt: skip
    assert result.loss.item() == pytest.approx(-math.sqrt(math.e / 2) + math.sqrt(2))
    assert grad == pytest.approx([0.0, -math.sqrt(math.e / 2) / 2, math.sqrt(2) / 2, math.sqrt(2) / 2])
    assert result.sums["clip_fraction"].item() == 1


def test_gmpo_moves_each_token_by_its_own_advantage() -> None:
    # One sequence at ratios 2 and 1/2, G = 1: gradients -A G / 2 of each token's own A, none where A is 0.
    _, grad = loss(
        "gmpo", [2.0, 0.5], [2.0, -1.0], [0.5] * 2, sequences=torch.tensor([0, 0]), clip_low=1.0, clip_high=1.0
    )
    assert grad == pytest.approx([-1.0, 0.5])
    _, gradient = loss("gmpo", [1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1 / 3] * 3, sequences=torch.tensor([0, 0, 0]))
    assert gradient == pytest.approx([0.0, 0.0, -1 / 3])


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    # log p = ln r - 1. Weights min(2, 1.28) = 1.28, 0.5 and 1. L = -w A log p, gradient -w A.
    result, grad = loss("cispo", [2.0, 0.5, 1.0], [1.0, -1.0, 2.0])
    assert result.loss.item() == pytest.approx(-1.28 * (LN2 - 1) + 0.5 * (-LN2 - 1) + 2.0)
    assert grad == pytest.approx([-1.28, 0.5, -2.0])
    assert result.sums["clip_fraction"].item() == 1
    # With a lower bound of 0.8 the second weight rises.
    _, bounded = loss("cispo", [2.0, 0.5, 1.0], [1.0, -1.0, 2.0], clip_low=0.2)
    assert bounded == pytest.approx([-1.28, 0.8, -2.0])


def test_sapo_fades_gradients_out() -> None:
    # r 1, A 2, tau 1: L = -2 * 4 * 0.5 = -4, gradient -A. r 2, A 1: sigmoid(1) = 0.7310586: L = -2.9242343, gradient
    # -4 * 0.7310586 * 0.2689414 * 2 = -1.5728955. r 2, A -1, tau 2: sigmoid(2) = 0.8807971: L = 4/2 * that = 1.7615942,
    # gradient 4 * 0.8807971 * 0.1192029 * 2 = 0.8399487.
    result, grad = loss("sapo", [1.0, 2.0, 2.0], [2.0, 1.0, -1.0], tau_neg=2.0)
    assert result.loss.item() == pytest.approx(-4.0 - 2.9242343 + 1.7615942)
    assert grad == pytest.approx([-2.0, -1.5728955, 0.8399487], rel=1e-6)
    # The gate 4 s (1 - s): 1, 0.7864477, 0.4199744.
    assert result.sums["gate"].item() == pytest.approx(1 + 0.7864477 + 0.4199744)


def test_gpg_has_no_ratio() -> None:
    result, grad = loss("gpg", [2.0, 0.5], [1.0, -3.0], [1.0, 0.5])
    assert result.loss.item() == pytest.approx(-(LN2 - 1) + 0.5 * 3 * (-LN2 - 1))
    assert grad == pytest.approx([-1.0, 1.5])


def test_dppo_tv_masks_by_the_change_of_probability() -> None:
    # From 0.5 with A > 0: to 0.8 is too far, to 0.6 not. With A < 0: to 0.2 is too far, and from 0.8 the gradient leads
    # back: kept with ratio 1.6. From 0.001 to 0.1: a ratio of 100 counts as 20, and is not masked.
    old = [math.log(p) for p in (0.5, 0.5, 0.5, 0.5, 0.001)]
    result, grad = loss("dppo_tv", [1.6, 1.2, 0.4, 1.6, 100.0], [1.0, 1.0, -1.0, -1.0, 1.0], old=old)
    assert grad == pytest.approx([0.0, -1.2, 0.0, 1.6, -20.0])
    assert result.sums["clip_fraction"].item() == 2
    # -w A log p of what is left.
    assert result.loss.item() == pytest.approx(-1.2 * math.log(0.6) + 1.6 * math.log(0.8) - 20 * math.log(0.1))


def test_dppo_kl_masks_by_the_binary_divergence() -> None:
    # From 0.5 to 0.8: 0.5 ln(0.5/0.8) + 0.5 ln(0.5/0.2) = 0.2231436 > 0.05: masked where A > 0, kept where A < 0.
    # From 0.5 to 0.55: 0.5 ln(0.5/0.55) + 0.5 ln(0.5/0.45) = 0.0050252: kept.
    old = [math.log(0.5)] * 4
    _, grad = loss("dppo_kl", [1.6, 1.6, 1.1, 0.4], [1.0, -1.0, 1.0, -1.0], old=old)
    assert grad == pytest.approx([0.0, 1.6, -1.1, 0.0])
    _, wide = loss("dppo_kl", [1.6], [1.0], old=old[:1], clip_high=0.2231437)
    assert wide == pytest.approx([-1.6])
    _, narrow = loss("dppo_kl", [1.6], [1.0], old=old[:1], clip_high=0.2231435)
    assert narrow == [0.0]


def test_dro_pulls_towards_the_old_policy() -> None:
    # d = 0.5, A 1, log p = -0.5: L = 0.5 + 0.1 / 2 * 0.25, gradient -1 + 0.1 * 0.5. A 0, d = -2: gradient -0.2.
    result, grad = loss("dro", [math.exp(0.5), math.exp(-2.0)], [1.0, 0.0])
    assert result.loss.item() == pytest.approx(0.5 + 0.0125 + 0.05 * 4)
    assert grad == pytest.approx([-0.95, -0.2])
    assert result.sums["quadratic"].item() == pytest.approx(0.125 + 2.0)
    assert LOSSES["dro"].idle_at_zero is False


def test_covariance_selects_tokens() -> None:
    # Means: log p -2, A 0. Products: 1*1, 0*0, -1*-1, 0*0, and (1)(-2) = -2 cancels nothing: mean of A is 0.
    logprobs, advantages = numbers(-1.0, -2.0, -3.0, -2.0), numbers(1.0, 0.0, -1.0, 0.0)
    assert covariance(logprobs, advantages).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert select_kl_cov(logprobs, advantages, share=0.5).tolist() == [True, False, True, False]
    # At least one; the bounds are exclusive.
    assert select_kl_cov(logprobs, advantages, share=0.01).sum() == 1
    selected = select_clip_cov(logprobs, advantages, seed=0, share=0.5, cov_low=0.5, cov_high=2.0)
    assert selected.tolist() == [True, False, True, False]
    selections = [select_clip_cov(logprobs, advantages, seed=seed, share=0.25, cov_low=0.5) for seed in range(20)]
    assert {tuple(selection.tolist()) for selection in selections} == {
        (True, False, False, False),
        (False, False, True, False),
    }
    assert not select_clip_cov(logprobs, advantages, seed=0, cov_low=1.0).any()
    assert (
        select_clip_cov(logprobs[:0], advantages[:0], seed=0).shape
        == select_kl_cov(logprobs[:0], advantages[:0]).shape
        == (0,)
    )


def test_clip_cov_and_kl_cov() -> None:
    selected = torch.tensor([True, False, False])
    # Clip-Cov: the first token is out; 1.1 is inside the bounds: -1.1; ratio 2 with A > 0 is cut off at 1.2.
    result, grad = loss("clip_cov", [1.1, 1.1, 2.0], [1.0, 1.0, 1.0], selected=selected)
    assert result.loss.item() == pytest.approx(-1.1 - 1.2)
    assert grad == pytest.approx([0.0, -1.1, 0.0])
    assert result.sums["selected_fraction"].item() == 1
    # KL-Cov: -A r, and 0.5 |ln r| on the first: gradient -2 + 0.5; no clipping on the last.
    result, grad = loss("kl_cov", [2.0, 2.0, 0.5], [1.0, -1.0, 1.0], selected=selected, penalty=0.5)
    assert result.loss.item() == pytest.approx(-2 + 0.5 * LN2 + 2 - 0.5)
    assert grad == pytest.approx([-1.5, 2.0, -0.5])


def data_of(name: str, count: int) -> dict[str, Tensor]:
    reads = inspect.signature(LOSSES[name].function).parameters
    data = {"sequences": torch.arange(count) // 2, "selected": torch.arange(count) % 4 == 1}
    return {key: value for key, value in data.items() if key in reads}


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"ppo_clip"}))
def test_losses_equal_ppo_at_ratio_one_only(name: str) -> None:
    ratios, advantages = [1.3, 1.6, 0.3, 0.4, 3.0, 2.5, 0.9, 1.05], [1.0, 1.0, -2.0, -2.0, -1.0, -1.0, 0.5, 0.5]
    _, gradient = loss(name, ratios, advantages, **data_of(name, 8))
    _, ppo = loss("ppo_clip", ratios, advantages)
    assert max(abs(a - b) for a, b in zip(gradient, ppo, strict=True)) > 0.1
    # On the policy that sampled, every one is REINFORCE: -A per token (where nothing is selected).
    unselected = data_of(name, 8) | (
        {"selected": torch.zeros(8, dtype=torch.bool)} if "selected" in data_of(name, 8) else {}
    )
    _, start = loss(name, [1.0] * 8, advantages, **unselected)
    assert start == pytest.approx([-a for a in advantages])


# Those that hold a weight constant are no derivative of their value: their gradients are in the tests by hand.
@pytest.mark.parametrize("name", ["ppo_clip", "gmpo", "sapo", "dro", "clip_cov", "kl_cov", "gpg"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(8, generator=generator, dtype=torch.float64) - 0.5
    logprobs = (old + torch.randn(8, generator=generator, dtype=torch.float64) * 0.3).requires_grad_()
    advantages = torch.randn(8, generator=generator, dtype=torch.float64)
    weights = torch.rand(8, generator=generator, dtype=torch.float64)
    data = data_of(name, 8)
    if "sequences" in data:
        # The derivative of its value where the tokens of a sequence have one advantage and one weight.
        advantages, weights = advantages[data["sequences"]], weights[data["sequences"]]
    assert torch.autograd.gradcheck(
        lambda x: LOSSES[name].function(x, old, advantages, weights, **data).loss, (logprobs,), eps=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_extreme_ratios_and_empty_batches_stay_finite(name: str) -> None:
    logprobs = torch.tensor([0.0, -300.0, -1e-9, -300.0], requires_grad=True)
    old = torch.tensor([-300.0, 0.0, -1e-9, -300.0])
    result = LOSSES[name].function(
        logprobs, old, torch.tensor([-1.0, 1.0, 1.0, -1.0]), torch.ones(4), **data_of(name, 4)
    )
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) and not value.requires_grad for value in (result.sums | result.maxima).values())
    none = torch.zeros(0)
    empty = LOSSES[name].function(none, none, none, none, **data_of(name, 0))
    assert empty.loss.item() == 0.0


def test_span_means_are_those_of_each_span() -> None:
    # Spans 0: (1 + 3) / 2; 1: 10; 2: (2 + 4 + 6) / 3.
    means = span_mean(numbers(1, 10, 2, 3, 4, 6), torch.tensor([0, 1, 2, 0, 2, 2]))
    assert means.tolist() == [2.0, 10.0, 4.0, 2.0, 4.0, 4.0]


def test_ppo_clip_equals_its_plain_formula_bit_for_bit() -> None:
    """PPO's clipping as the trainer had it before it could choose: the same operations in the same order."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(500, generator=generator) * 3
    start = old + torch.randn(500, generator=generator)
    advantages, weights = torch.randn(500, generator=generator), torch.rand(500, generator=generator)
    logprobs, was = start.clone().requires_grad_(), start.clone().requires_grad_()
    result = ppo_clip_loss(logprobs, old, advantages, weights)
    log_ratio = (was - old).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1.0 - 0.2, 1.0 + 0.28)
    expected = (weights * torch.maximum(plain, bounded)).sum()
    result.loss.backward()
    expected.backward()
    assert torch.equal(result.loss, expected)
    assert logprobs.grad is not None
    assert was.grad is not None
    assert torch.equal(logprobs.grad, was.grad)
    assert torch.equal(result.sums["approx_kl"], (ratio - 1.0 - log_ratio).sum())


def test_every_loss_names_its_paper_and_is_a_page() -> None:
    for name, entry in LOSSES.items():
        for function in filter(None, (entry.function, entry.select)):
            assert re.search(r"arXiv:\d{4}\.\d{4,5}", inspect.getdoc(function) or ""), name
            assert "``" in (inspect.getdoc(function) or ""), f"{name} has no formula"
            assert len(inspect.getsource(function).splitlines()) <= 60, name
            assert not {"self", "config"} & set(inspect.signature(function).parameters), name
