"""The critic's loss, against numbers worked out by hand, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.trainer.algorithms.losses.core import value_loss


def f(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_unclipped_value_loss_is_half_the_squared_error() -> None:
    # 1/2 (1 - 3)^2 = 2 with weight 1, 1/2 (2 - 1)^2 = 1/2 with weight 4: 2 + 2 = 4; unweighted 2.5.
    for old in (None, f(9, 9)):
        loss = value_loss(f(1, 2), f(3, 1), f(1, 4), old_values=old)
        assert float(loss.loss) == 4
        assert float(loss.sums["critic/loss"]) == 2.5
        assert float(loss.sums["critic/clip_fraction"]) == 0


def test_value_clipping_by_hand() -> None:
    # clip = 1/2, old value 0, return 2:
    #   V = 1:    clipped to 1/2, (1/2 - 2)^2 = 2.25 > (1 - 2)^2 = 1: the larger counts, 1.125, without gradient;
    #   V = 1/4:  not clipped, (1.75)^2 = 3.0625: 1.53125;
    #   V = -1:   clipped to -1/2, 6.25 < 9: it moved away, 4.5, with gradient V - R = -3;
    #   V = 5:    clipped to 1/2, 2.25 < 9: it overshot, 4.5, with gradient 3.
    values = f(1, 0.25, -1, 5).requires_grad_()
    loss = value_loss(values, f(2, 2, 2, 2), f(1, 1, 1, 1), old_values=f(0, 0, 0, 0), clip=0.5)
    assert float(loss.loss.detach()) == 1.125 + 1.53125 + 4.5 + 4.5
    assert float(loss.sums["critic/clip_fraction"]) == 1
    loss.loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, -1.75, -3, 3]


def test_the_gradient_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    # Far from the corners, where there is no derivative: differences to the clip range of at least 0.05.
    old, returns, weights = torch.randn(12).double(), torch.randn(12).double(), torch.rand(12).double()
    values = (old + torch.tensor([0.1, -0.1, 0.3, -0.3] * 3)).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return value_loss(x, returns, weights, old_values=old, clip=0.2).loss

    assert torch.autograd.gradcheck(loss, (values,))


def test_value_loss_of_no_tokens_is_zero() -> None:
    assert float(value_loss(f(), f(), f(), old_values=f(), clip=0.2).loss) == 0
