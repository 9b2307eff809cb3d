"""Rows without advantage cost no forward pass and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.losses.core import weigh
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.objectives import PolicyObjective
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy

# Sharing would round otherwise, and the first step of AdamW makes much of next to nothing.
BATCH = BatchConfig(max_tokens_per_micro_batch=64, share_prefixes=False)


def learner(path: Path) -> TorchLearner:
    return TorchLearner.create(PolicyConfig(model=ModelConfig(path=path, device="cpu"), optim=OptimConfig(lr=0.01)), 10)


def weights(of: TorchLearner) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for _, tensor in of.export_weights()])


@pytest.fixture
def rows(row: Callable[..., TrainRow]) -> list[TrainRow]:
    return [row(10 + n, 4, seed=n, name=f"t{n}", advantage=(1.0, 0.0, -0.5, 0.0)[n]) for n in range(4)]


def test_the_update_is_that_of_all_rows(model_dir: Callable[..., Path], rows: list[TrainRow]) -> None:
    one, other = learner(model_dir()), learner(model_dir())
    algorithm = AlgorithmConfig(drop_zero_variance=False, old_logprobs="recompute")
    metrics = update_policy(one, rows, algorithm, BATCH, seed=0)
    # By hand: all rows go through the model, divided by the tokens of all rows.
    weighed, normalizer = weigh(rows, "token_mean")
    assert normalizer == 16
    other.forward_backward(pack(weighed, 64), PolicyObjective.of(algorithm), normalizer)
    other.optim_step()
    torch.testing.assert_close(weights(one), weights(other), atol=1e-6, rtol=0)
    assert metrics["train/tokens"] == 8


def test_an_entropy_bonus_reaches_every_row(model_dir: Callable[..., Path], rows: list[TrainRow]) -> None:
    algorithm = AlgorithmConfig(drop_zero_variance=False, entropy_coef=0.01)
    assert update_policy(learner(model_dir()), rows, algorithm, BATCH, seed=0)["train/tokens"] == 16


def test_a_step_without_any_advantage_changes_nothing(model_dir: Callable[..., Path], rows: list[TrainRow]) -> None:
    idle = [train_row for train_row in rows if not train_row.advantage]
    one = learner(model_dir())
    initial = weights(one).clone()
    metrics = update_policy(one, idle, AlgorithmConfig(drop_zero_variance=False), BATCH, seed=0)
    assert torch.equal(weights(one), initial)
    assert metrics["train/skipped_updates"] == 1
