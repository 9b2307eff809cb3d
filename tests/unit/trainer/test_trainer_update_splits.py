"""Every loss: the gradient of an update does not depend on how its rows are split over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.losses import LOSSES
from turnwise.trainer.config.policy import ModelConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import StepResult
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy

Row = Callable[..., TrainRow]


class Ranks:
    """Learners with equal weights that share micro-batches out; gradients are summed, as an all-reduce does.

    The normaliser is that of the whole step and the same on each of them: nothing is averaged over ranks.
    """

    def __init__(self, path: Path, count: int) -> None:
        config = PolicyConfig(model=ModelConfig(path=path, device="cpu"))
        self.learners = [TorchLearner.create(config, 10) for _ in range(count)]
        self.logprobs = self.learners[0].logprobs
        self.gradient = torch.zeros(0)
        self.shares: list[int] = []

    def forward_backward(self, batches: Any, objective: Any, normalizer: float) -> Any:
        shares = [batches[number :: len(self.learners)] for number in range(len(self.learners))]
        self.shares = [len(share) for share in shares]
        stats = [
            learner.forward_backward(share, objective, normalizer)
            for learner, share in zip(self.learners, shares, strict=True)
        ]
        return stats[0]

    def optim_step(self) -> StepResult:
        gradients = []
        for learner in self.learners:
            parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in learner.policy.model.parameters()]
            gradients.append(torch.cat([part.flatten() for part in parts]))
        self.gradient = torch.stack(gradients).sum(0)
        return StepResult(0.0, {})


@pytest.fixture
def rows(row: Row) -> list[TrainRow]:
    """Ragged rows; trajectory b has two; the last of them has no advantage."""
    return [
        row(length, 2 + number % 3, seed=number, name=name, leaf=number, advantage=advantage)
        for number, (length, name, advantage) in enumerate(
            [(5, "a", 1.0), (13, "b", -2.0), (9, "b", -2.0), (12, "c", 0.5), (7, "d", 1.5), (11, "e", 0.0)]
        )
    ]


def gradient(
    path: Path, rows: list[TrainRow], budget: int, ranks: int, algorithm: dict[str, Any]
) -> tuple[Tensor, Ranks]:
    learner = Ranks(path, ranks)
    config = AlgorithmConfig.model_validate(algorithm)
    update_policy(learner, rows, config, BatchConfig(max_tokens_per_micro_batch=budget), seed=0)  # type: ignore[arg-type]
    return learner.gradient, learner


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_splits_keep_gradients(model_dir: Callable[..., Path], rows: list[TrainRow], name: str) -> None:
    options = {"share": 0.2} if name in ("clip_cov", "kl_cov") else {}
    algorithm = {"loss": name, "loss_options": options, "entropy_coef": 0.01}
    unsplit, one = gradient(model_dir(), rows, 1000, 1, algorithm)
    split, two = gradient(model_dir(), rows, 1, 2, algorithm)
    assert (one.shares, two.shares) == ([1], [3, 3])
    assert unsplit.abs().max() > 1e-4
    torch.testing.assert_close(split, unsplit, atol=1e-6, rtol=1e-5)
