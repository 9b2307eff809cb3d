"""Correction for the gap between trainer and rollout: weights, rejection and metrics by hand; what an update gets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.correction import (
    CorrectionConfig,
    correct,
    gap_metrics,
    importance_weights,
    rejected_tokens,
    span_indices,
)
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, TrainRow
from turnwise.trainer.learn.learner import StepResult
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.observe.metrics import meaning

Row = Callable[..., TrainRow]
Models = Callable[..., Path]
LN2 = math.log(2.0)

# d = trainer - rollout: ln 2, -ln 2, ln 4. Ratios 2, 1/2, 4.
ROLLOUT = torch.tensor([-2.0, -1.0, -3.0])
TRAINER = ROLLOUT + torch.tensor([LN2, -LN2, 2 * LN2])
TOKENS, SPANS = torch.arange(3), torch.tensor([0, 0, 1])


def test_importance_weights_by_hand() -> None:
    def weights(spans: torch.Tensor, **bounds: float) -> list[float]:
        return importance_weights(TRAINER, ROLLOUT, spans, **bounds).tolist()  # type: ignore[arg-type]

    assert weights(TOKENS, high=3.0) == pytest.approx([2.0, 0.5, 3.0])
    assert weights(TOKENS, high=3.0, low=0.6) == pytest.approx([2.0, 0.0, 0.0])
    # A span's ratio is the product of its tokens': 1, and 4.
    assert weights(SPANS, high=3.0) == pytest.approx([1.0, 1.0, 3.0])
    assert weights(SPANS, high=5.0, low=0.5) == pytest.approx([1.0, 1.0, 4.0])
    far = importance_weights(torch.tensor([0.0, -300.0]), torch.tensor([-300.0, 0.0]), torch.arange(2), high=1e9)
    assert far.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


def test_rejection_by_hand() -> None:
    def rejected(statistic: str, spans: torch.Tensor, high: float) -> list[bool]:
        return rejected_tokens(TRAINER, ROLLOUT, spans, statistic=statistic, high=high).tolist()

    # k1: ratios 2, 1/2, 4; of spans the geometric means 1 and 4; the lower bound is 1 / high.
    assert rejected("k1", TOKENS, 3.0) == [False, False, True]
    assert rejected("k1", TOKENS, 1.9) == [True, True, True]
    assert rejected("k1", SPANS, 3.0) == [False, False, True]
    # k2: ln2^2 / 2 = 0.2402, 0.2402, 0.9609; mean of the first span 0.2402.
    assert rejected("k2", SPANS, 0.25) == [False, False, True]
    # k3: 2 - 1 - ln2 = 0.3069, 0.5 - 1 + ln2 = 0.1931, 4 - 1 - ln4 = 1.6137; mean 0.25.
    assert rejected("k3", SPANS, 0.2501) == [False, False, True]
    assert rejected("k3", TOKENS, 0.3) == [True, False, True]
    assert rejected_tokens(TRAINER[:0], ROLLOUT[:0], SPANS[:0], statistic="k1", high=2.0).shape == (0,)


def test_gap_metrics_by_hand() -> None:
    # First two tokens: d sums to 0; k3 (0.3069 + 0.1931) / 2; weights 2 and 1/2: 2.5^2 / (2 * 4.25) and 4.25 / 2 - 1.
    metrics = gap_metrics(TRAINER[:2], ROLLOUT[:2], torch.zeros(2, dtype=torch.int64))
    assert metrics == pytest.approx(
        {"kl": 0.0, "kl_k3": 0.25, "ess": 6.25 / 8.5, "chi2": 1.125, "ppl_gap": 0.0}, abs=1e-6
    )
    # Of sequences: means of -d are 0 and -2 ln 2.
    assert gap_metrics(TRAINER, ROLLOUT, SPANS)["ppl_gap"] == pytest.approx(-LN2)
    assert gap_metrics(TRAINER, ROLLOUT, SPANS)["kl"] == pytest.approx(-2 * LN2 / 3)
    assert gap_metrics(TRAINER[:0], ROLLOUT[:0], SPANS[:0]) == {}


@pytest.fixture
def rows(row: Row) -> list[TrainRow]:
    """Trajectory a has two rows; c trains nothing."""
    trained = [
        row(6, 2, seed=1, name="a"),
        row(7, 3, seed=2, name="a", leaf=1),
        row(5, 2, seed=3, name="b", advantage=-1.0),
    ]
    return [*trained, row(4, 0, name="c")]


def scores(rows: list[TrainRow], shifts: list[list[float]]) -> dict[tuple[str, int], torch.Tensor]:
    """The trainer's log-probabilities: the rollout's and something."""
    return {
        (row.sample.trajectory_id, row.sample.leaf): torch.from_numpy(row.sample.rollout_logprobs[row.sample.loss_mask])
        + torch.tensor(shift)
        for row, shift in zip(rows, shifts, strict=False)
    }


def test_levels_number_tokens_turns_rows_and_trajectories(rows: list[TrainRow]) -> None:
    rows = rows[:3]
    rows[1].sample.turn_ids[-1] = 5
    assert span_indices(rows, "token").tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert span_indices(rows, "turn").tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert span_indices(rows, "sequence").tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert span_indices(rows, "trajectory").tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_correction_weighs_rows_and_masks_rejected_tokens(rows: list[TrainRow]) -> None:
    # Ratios: a 2, 1 | 1, 1, 4; b 1/8, 1.
    trainer = scores(rows, [[LN2, 0.0], [0.0, 0.0, 2 * LN2], [-3 * LN2, 0.0]])
    config = CorrectionConfig.model_validate(
        {"high": 3.0, "reject": [{"statistic": "k1", "high": 5.0, "level": "token"}]}
    )
    corrected = correct(rows, trainer, config)
    [first, second, third, empty] = corrected.rows
    assert np.asarray(first.importance)[first.sample.loss_mask].tolist() == pytest.approx([2.0, 1.0])
    assert np.asarray(second.importance)[second.sample.loss_mask].tolist() == pytest.approx([1.0, 1.0, 3.0])
    # 1/8 is below 1/5: the first token of b is out, in its mask and in nothing else.
    assert third.sample.trained_tokens == 1
    assert corrected.kept["b", 0].tolist() == [False, True]
    assert rows[2].sample.trained_tokens == 2
    assert empty is rows[3]
    assert corrected.metrics["correction/rejected"] == pytest.approx(1 / 7)
    assert corrected.metrics["correction/weight_max"] == pytest.approx(3.0)
    assert [name for name in corrected.metrics if meaning(name) is None] == []
    # A trajectory is one: of a's five ratios the geometric mean is 8^(1/5) = 1.52; of b's 1/8 and 1 it is 0.35.
    units = correct(rows, trainer, CorrectionConfig.model_validate(
        {"weights": "none", "reject": [{"statistic": "k1", "high": 1.6, "level": "trajectory"}]}
    ))  # fmt: skip
    assert [row.sample.trained_tokens for row in units.rows] == [2, 3, 0, 0]


class Watched:
    """A learner that notes batches and keeps gradients instead of taking a step."""

    def __init__(self, path: Path) -> None:
        config = PolicyConfig(model=ModelConfig(path=path, device="cpu"), optim=OptimConfig())
        self.learner = TorchLearner.create(config, 10)
        self.steps: list[tuple[list[MicroBatch], float]] = []
        self.gradients: list[torch.Tensor] = []
        self.logprobs = self.learner.logprobs

    def forward_backward(self, batches, objective, normalizer):
        self.steps.append((list(batches), normalizer))
        return self.learner.forward_backward(batches, objective, normalizer)

    def optim_step(self) -> StepResult:
        gradients = [p.grad.flatten() for p in self.learner.policy.model.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(gradients) if gradients else torch.zeros(0))
        self.learner.policy.model.zero_grad()
        return StepResult(0.0, {})


def update(
    path: Path, rows: list[TrainRow], budget: int = 100, **algorithm: object
) -> tuple[Watched, dict[str, float]]:
    watched = Watched(path)
    config = AlgorithmConfig.model_validate(algorithm)
    metrics = update_policy(watched, rows, config, BatchConfig(max_tokens_per_micro_batch=budget), seed=0)  # type: ignore[arg-type]
    return watched, metrics


def test_recomputed_old_logprobs_separate_ratio_and_weight(model_dir: Models, rows: list[TrainRow]) -> None:
    """Decoupled: the ratio is against the trainer's own forward, the weight says how far that is from the rollout."""
    section = {"old_logprobs": "recompute", "correction": {"high": 1.5}}
    watched, metrics = update(model_dir(), rows, **section)
    [([batch], normalizer)] = watched.steps
    assert normalizer == 7.0
    assert metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert batch.old_logprobs is not None
    ratio = (batch.old_logprobs - batch.rollout_logprobs).exp().clamp(max=1.5)
    torch.testing.assert_close(batch.weights, ratio)
    assert metrics["correction/weight"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    split, _ = update(model_dir(), rows, budget=1, **section)
    torch.testing.assert_close(split.gradients[0], watched.gradients[0], atol=1e-6, rtol=1e-5)


def test_rollout_logprobs_allow_rejection_alone(model_dir: Models, rows: list[TrainRow]) -> None:
    reject = {"statistic": "k1", "level": "token", "high": 2.0}
    watched, metrics = update(model_dir(), rows, correction={"weights": "none", "reject": [reject]})
    [(batches, normalizer)] = watched.steps
    trained = sum(batch.trained_tokens for batch in batches)
    # What is out is in no denominator; the ratio is still against what the server reported.
    assert normalizer == max(1, trained)
    assert metrics["correction/rejected"] == pytest.approx(1 - trained / 7)
    assert 0 < trained < 7
    for batch in batches:
        assert batch.old_logprobs is not None
        assert torch.equal(batch.old_logprobs, batch.rollout_logprobs)
    nothing, metrics = update(
        model_dir(), rows, correction={"weights": "none", "reject": [reject | {"high": 1.000001}]}
    )
    assert metrics["correction/rejected"] == 1.0
    assert nothing.gradients[0].numel() == 0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"correction": {}}, "set algorithm.old_logprobs to recompute"),
        ({"loss": "gpg", "correction": {"weights": "none"}}, "nothing is corrected; leave algorithm.correction out"),
        (
            {"correction": {"weights": "none", "high": 5.0, "reject": [{"statistic": "k1", "high": 2.0}]}},
            "high is 5.0, but weights is none, so nothing is weighted: remove it",
        ),
        ({"loss": "gpg", "correction": {"low": 0.5}}, "only weights: mask has a lower bound"),
        ({"loss": "gpg", "correction": {"weights": "mask", "low": 3.0}}, "weights from 3 to 2 keep nothing"),
        (
            {"loss": "gpg", "correction": {"reject": [{"statistic": "k1", "high": 0.5}]}},
            "ratios from 2 to 0.5 keep nothing",
        ),
    ],
)
def test_invalid_correction_raises_validation_error(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        AlgorithmConfig.model_validate(section)
    assert AlgorithmConfig.model_validate({"loss": "gpg", "correction": {}}).correction is not None


# Ratios by token: a's first row 2, 1 (turns 0, 0), its second 1/2, 4, 4 (turns 1, 2, 2), b's 1/8, 2 (turns 0, 1).
# By turn: a 2 | 1/2, 16; b 1/8, 2. By row: 2 | 8; 1/4. By trajectory: a 16; b 1/4.
# Truncated at 3, or 0 outside of 1/3 to 3 (IcePop).
@pytest.mark.parametrize(
    ("level", "truncated", "masked"),
    [
        ("token", [2, 1, 0.5, 3, 3, 0.125, 2], [2, 1, 0.5, 0, 0, 0, 2]),
        ("turn", [2, 2, 0.5, 3, 3, 0.125, 2], [2, 2, 0.5, 0, 0, 0, 2]),
        ("sequence", [2, 2, 3, 3, 3, 0.25, 0.25], [2, 2, 0, 0, 0, 0, 0]),
        ("trajectory", [3, 3, 3, 3, 3, 0.25, 0.25], [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_truncation_and_masking_at_every_level(
    rows: list[TrainRow], level: str, truncated: list[float], masked: list[float]
) -> None:
    rows = rows[:3]
    for row, turns in zip(rows, [[0, 0], [1, 2, 2], [0, 1]], strict=True):
        row.sample.turn_ids[row.sample.loss_mask] = turns
    trainer = scores(rows, [[LN2, 0.0], [-LN2, 2 * LN2, 2 * LN2], [-3 * LN2, LN2]])
    for weights, expected in (("truncate", truncated), ("mask", masked)):
        corrected = correct(
            rows, trainer, CorrectionConfig.model_validate({"weights": weights, "level": level, "high": 3.0})
        )
        importance = np.concatenate([np.asarray(row.importance)[row.sample.loss_mask] for row in corrected.rows])
        assert importance.tolist() == pytest.approx(expected, rel=1e-5)
        assert corrected.metrics["correction/zero_weights"] == pytest.approx(expected.count(0) / 7)
        assert corrected.metrics["correction/rejected"] == 0.0


# The same ratios 2, 1 | 1/2, 4 | 1/8 2 as log-ratios in units of ln 2: 1, 0 | -1, 2, 2 | -3, 1, turns as above.
# k1, mean: of turns 2^(1/2) | 1/2, 4 | 1/8, 2; of rows 2^(1/2), 2, 1/2; of trajectories 2^(4/5), 1/2.
# k2, (n ln 2)^2 / 2 = 0.2402 n^2: of turns 0.12 | 0.24, 0.96 | 2.16, 0.24; of rows 0.12, 0.72, 1.20.
# k3, 2^n - 1 - n ln 2: 0.307, 0 | 0.193, 1.614, 1.614 | 1.204, 0.307; of turns 0.153 | 0.193, 1.614 | 1.204, 0.307; of
# rows 0.153, 1.140, 0.756.
@pytest.mark.parametrize(
    ("statistic", "level", "high", "kept_mask"),
    [
        ("k1", "turn", 3.0, [1, 1, 1, 0, 0, 0, 1]),
        ("k1", "sequence", 1.9, [1, 1, 0, 0, 0, 0, 0]),
        ("k1", "trajectory", 1.9, [1, 1, 1, 1, 1, 0, 0]),
        ("k2", "turn", 0.5, [1, 1, 1, 0, 0, 0, 1]),
        ("k2", "sequence", 1.0, [1, 1, 1, 1, 1, 0, 0]),
        ("k3", "turn", 0.25, [1, 1, 1, 0, 0, 0, 0]),
        ("k3", "sequence", 1.0, [1, 1, 0, 0, 0, 1, 1]),
        ("k3", "token", 0.2, [0, 1, 1, 0, 0, 0, 0]),
    ],
)
def test_rejection_at_every_level(
    rows: list[TrainRow], statistic: str, level: str, high: float, kept_mask: list[int]
) -> None:
    rows = rows[:3]
    for row, turns in zip(rows, [[0, 0], [1, 2, 2], [0, 1]], strict=True):
        row.sample.turn_ids[row.sample.loss_mask] = turns
    trainer = scores(rows, [[LN2, 0.0], [-LN2, 2 * LN2, 2 * LN2], [-3 * LN2, LN2]])
    config = {"weights": "none", "reject": [{"statistic": statistic, "level": level, "high": high}]}
    corrected = correct(rows, trainer, CorrectionConfig.model_validate(config))
    kept_tokens = torch.cat([corrected.kept[row.sample.trajectory_id, row.sample.leaf] for row in corrected.rows])
    assert kept_tokens.int().tolist() == kept_mask
    assert corrected.metrics["correction/rejected"] == pytest.approx(1 - sum(kept_mask) / 7)


class Stepping(Watched):
    """A learner that does take its steps."""

    def optim_step(self) -> StepResult:
        return self.learner.optim_step()


def test_minibatches_share_the_weights_computed_before_the_first(model_dir: Models, rows: list[TrainRow]) -> None:
    """Decoupled over two passes of two minibatches: weights and old policy are those of the beginning."""
    watched = Stepping(model_dir())
    initial = watched.logprobs(pack(rows, 100))[0]
    config = AlgorithmConfig.model_validate(
        {"old_logprobs": "recompute", "correction": {"high": 1.5}, "epochs": 2, "minibatches": 2}
    )
    metrics = update_policy(watched, rows, config, BatchConfig(max_tokens_per_micro_batch=100), seed=0)  # type: ignore[arg-type]
    assert len(watched.steps) == 4
    for first, second in ((0, 1), (2, 3)):
        batches = [*watched.steps[first][0], *watched.steps[second][0]]
        old = torch.cat([batch.old_logprobs for batch in batches if batch.old_logprobs is not None])
        torch.testing.assert_close(old.sort().values, initial.sort().values, atol=1e-5, rtol=0)
        rollout = torch.cat([batch.rollout_logprobs for batch in batches])
        weights = torch.cat([batch.weights for batch in batches])
        torch.testing.assert_close(weights, (old - rollout).exp().clamp(max=1.5), atol=1e-5, rtol=1e-5)
    assert metrics["train/ratio_max"] > 1.001
