from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.engine.accelerator import require_device
from turnwise.errors import CheckpointError, ConfigError, TrainError
from turnwise.trainer.algorithms.losses import LossSums
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig, ScheduleConfig
from turnwise.trainer.core import MicroBatch, TokenScores, TrainRow
from turnwise.trainer.learn.objectives import CrossEntropyObjective, PolicyObjective
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_metrics
from turnwise.trainer.observe.metrics import finite_metrics, meaning

Row = Callable[..., TrainRow]
Models = Callable[..., Path]


def make_learner(
    path: Path, total_steps: int = 100, schedule: ScheduleConfig | None = None, **optim: object
) -> TorchLearner:
    config = PolicyConfig(
        model=ModelConfig(path=path, device="cpu"),
        optim=OptimConfig.model_validate({"lr": 1e-3, **optim}),
        schedule=schedule or ScheduleConfig(),
    )
    return TorchLearner.create(config, total_steps)


def gradients(learner: TorchLearner) -> list[torch.Tensor]:
    clones = [p.grad.clone() for p in learner.policy.model.parameters() if p.grad is not None]
    learner.policy.model.zero_grad()
    return clones


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(3, 20), min_size=2, max_size=8),
    budgets=st.tuples(st.integers(1, 30), st.integers(31, 200)),
)
def test_gradients_do_not_depend_on_micro_batches(
    model_dir: Models, row: Row, lengths: list[int], budgets: tuple[int, int]
) -> None:
    learner = make_learner(model_dir("qwen3"))
    objective = PolicyObjective(entropy_coef=0.01)
    rows = [row(n, seed=i, name=f"t{i}", advantage=(-1.0) ** i, weight=1 / (i + 1)) for i, n in enumerate(lengths)]
    passes = []
    for budget in (*budgets, 100_000):
        batches = pack(rows, budget)
        for batch in batches:
            batch.old_logprobs = batch.rollout_logprobs
        stats = learner.forward_backward(batches, objective, normalizer=17.0)
        passes.append((stats, gradients(learner)))
    whole_stats, unsplit = passes[-1]
    for stats, split in passes[:-1]:
        assert stats.tokens == whole_stats.tokens == sum(n // 2 for n in lengths)
        assert stats.loss == pytest.approx(whole_stats.loss, abs=1e-6, rel=1e-5)
        assert stats.means == pytest.approx(whole_stats.means, abs=1e-5, rel=1e-5)
        assert stats.maxima == pytest.approx(whole_stats.maxima, abs=1e-5, rel=1e-5)
        for got, want in zip(split, unsplit, strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_old_logprobs_give_the_ratio(model_dir: Models, row: Row) -> None:
    """Old log-probabilities of older weights: the loss is that of the ratios computed apart."""
    learner = make_learner(model_dir("qwen3"), lr=5e-2)
    rows = [row(12, seed=n, name=f"t{n}", advantage=1.0 if n % 2 else -1.0) for n in range(4)]
    batches = pack(rows, 30)
    old = learner.logprobs(batches)
    for batch, logprobs in zip(batches, old, strict=True):
        assert not logprobs.requires_grad
        batch.old_logprobs = logprobs
    objective = PolicyObjective()
    first = learner.forward_backward(batches, objective, 24.0)
    assert first.means["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first.means["clip_fraction"] == 0.0
    learner.optim_step()
    second = learner.forward_backward(batches, objective, 24.0)
    ratio = torch.cat([(new - was).exp() for new, was in zip(learner.logprobs(batches), old, strict=True)])
    advantages = torch.cat([batch.advantages for batch in batches])
    expected = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum() / 24.0
    assert second.loss == pytest.approx(expected.item(), rel=1e-4)
    assert second.means["ratio"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert second.means["clip_fraction"] > 0
    assert second.means["approx_kl"] > 0.01
    assert second.loss < first.loss


def test_ratio_is_one_without_old_logprobs_and_has_a_gradient(model_dir: Models, row: Row) -> None:
    learner = make_learner(model_dir("qwen3"))
    batches = pack([row(10, advantage=2.0)], 100)
    stats = learner.forward_backward(batches, PolicyObjective(), 5.0)
    assert stats.loss == pytest.approx(-2.0)
    assert stats.means["ratio"] == 1.0
    policy_gradient = gradients(learner)
    learner.forward_backward(batches, CrossEntropyObjective(), 2.5)
    for got, want in zip(policy_gradient, gradients(learner), strict=True):
        # d/dθ of -A log p: with ratio 1 the same as cross-entropy scaled by the advantage.
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_the_gap_to_the_rollout_is_measured(model_dir: Models, row: Row) -> None:
    learner = make_learner(model_dir("qwen3"))
    (batch,) = pack([row(12)], 100)
    exact = learner.logprobs([batch])[0]
    shift = torch.linspace(0, 0.3, len(exact))
    batch.rollout_logprobs = exact - shift
    stats = learner.forward_backward([batch], PolicyObjective(), 6.0)
    assert stats.means["gap_abs"] == pytest.approx(0.15, abs=1e-5)
    assert stats.maxima["gap_max"] == pytest.approx(0.3, abs=1e-5)
    assert stats.means["gap_kl"] == pytest.approx((shift.exp() - 1 - shift).mean().item(), abs=1e-5)


def test_a_toy_objective_is_learned(model_dir: Models, row: Row) -> None:
    """Rewarding one of two continuations makes it likely, under both optimizers."""
    rewarded = row(4, 1, ids=[5, 6, 7, 11], name="good", advantage=1.0)
    punished = row(4, 1, ids=[5, 6, 7, 12], name="bad", advantage=-1.0)
    for optim in ({"name": "adamw", "lr": 3e-3}, {"name": "muon", "lr": 3e-3, "muon": {"lr": 0.02}}):
        learner = make_learner(model_dir("qwen3"), **optim)
        batches = pack([rewarded, punished], 100)
        initial = torch.cat(learner.logprobs(batches))
        for _ in range(20):
            learner.forward_backward(batches, PolicyObjective(), 2.0)
            assert learner.optim_step().skipped is None
        learned = torch.cat(learner.logprobs(batches))
        assert learned[0] > initial[0] + 1.0
        assert learned[0] > learned[1] + 2.0


def test_clipping_and_schedule(model_dir: Models, row: Row) -> None:
    schedule = ScheduleConfig(kind="linear", warmup_steps=2)
    learner = make_learner(model_dir("qwen3"), 4, schedule, lr=1.0, max_grad_norm=0.5)
    rates = []
    for _ in range(4):
        learner.forward_backward(pack([row(10, advantage=100.0)], 50), PolicyObjective(), 1.0)
        norm = torch.cat([g.flatten() for g in (p.grad for p in learner.policy.model.parameters()) if g is not None])
        result = learner.optim_step()
        assert result.grad_norm == pytest.approx(norm.norm().item(), rel=1e-4)
        rates.append(result.learning_rates["adamw"])
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert learner.steps == 4


class _Poison:
    """An objective whose gradient is not finite."""

    entropy = False

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        return LossSums((scores.logprobs * float("inf")).sum())


def test_non_finite_gradients_skip_the_step_and_are_logged(
    model_dir: Models, row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner(model_dir("qwen3"))
    initial = [tensor.clone() for _, tensor in learner.export_weights()]
    batches = pack([row(8)], 100)
    with caplog.at_level(logging.ERROR):
        learner.forward_backward(batches, _Poison(), 1.0)
        assert learner.optim_step().skipped == "non_finite"
    assert "gradient norm is" in caplog.text
    assert learner.skipped == {"non_finite": 1}
    for was, (_, now) in zip(initial, learner.export_weights(), strict=True):
        assert torch.equal(was, now)
    # Nothing of it is left: the next update is an ordinary one.
    learner.forward_backward(batches, PolicyObjective(), 1.0)
    assert learner.optim_step().skipped is None
    assert all(torch.isfinite(tensor).all() for _, tensor in learner.export_weights())
    for _ in range(9):
        learner.forward_backward(batches, _Poison(), 1.0)
        learner.optim_step()
    learner.forward_backward(batches, _Poison(), 1.0)
    with pytest.raises(TrainError, match="10 optimizer steps in a row"):
        learner.optim_step()


def test_steps_without_a_finite_gradient_are_counted_on_after_a_resume(
    model_dir: Models, row: Row, tmp_path: Path
) -> None:
    batches = pack([row(8)], 100)
    learner = make_learner(model_dir("qwen3"))
    for _ in range(9):
        learner.forward_backward(batches, _Poison(), 1.0)
        learner.optim_step()
    learner.save(tmp_path)
    resumed = make_learner(model_dir("qwen3"))
    resumed.load(tmp_path)
    resumed.forward_backward(batches, _Poison(), 1.0)
    with pytest.raises(TrainError, match="10 optimizer steps in a row"):
        resumed.optim_step()


def test_a_step_without_rows_changes_nothing(model_dir: Models, row: Row) -> None:
    learner = make_learner(model_dir("qwen3"))
    initial = [tensor.clone() for _, tensor in learner.export_weights()]
    stats = learner.forward_backward([], PolicyObjective(), 1.0)
    assert (stats.loss, stats.tokens, stats.means) == (0.0, 0, {})
    assert learner.optim_step().skipped == "no_gradient"
    assert learner.skipped == {"no_gradient": 1}
    for was, (_, now) in zip(initial, learner.export_weights(), strict=True):
        assert torch.equal(was, now)
    with pytest.raises(TrainError, match="normaliser"):
        learner.forward_backward([], PolicyObjective(), 0.0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_save_and_load_continue_bit_for_bit(model_dir: Models, row: Row, tmp_path: Path, name: str) -> None:
    def advance(learner: TorchLearner, steps: range) -> None:
        for step in steps:
            learner.forward_backward(pack([row(12, seed=step), row(7, seed=step + 50)], 15), PolicyObjective(), 9.0)
            learner.optim_step()

    schedule = ScheduleConfig(kind="cosine", warmup_steps=2)
    straight = make_learner(model_dir("qwen3"), 8, schedule, name=name)
    advance(straight, range(4))
    straight.save(tmp_path / "four")
    saved = [tensor.clone() for _, tensor in straight.export_weights()]
    advance(straight, range(4, 8))
    resumed = make_learner(model_dir("qwen3", 1), 8, schedule, name=name)
    resumed.load(tmp_path / "four")
    assert resumed.steps == 4
    for want, (_, got) in zip(saved, resumed.export_weights(), strict=True):
        assert torch.equal(got, want)
    advance(resumed, range(4, 8))
    for (_, want), (_, got) in zip(straight.export_weights(), resumed.export_weights(), strict=True):
        assert torch.equal(got, want)


def test_broken_checkpoints_raise_checkpoint_error(model_dir: Models, tmp_path: Path) -> None:
    learner = make_learner(model_dir("qwen3"))
    with pytest.raises(CheckpointError, match=r"lacks optimizer\.pt"):
        learner.load(tmp_path)
    learner.save(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        learner.load(tmp_path / "a")
    learner.save(tmp_path / "b")
    (tmp_path / "b" / "optimizer.pt").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read"):
        learner.load(tmp_path / "b")
    make_learner(model_dir("llama")).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no weights for this model"):
        learner.load(tmp_path / "c")


def test_invalid_settings_raise_train_error(model_dir: Models) -> None:
    with pytest.raises(TrainError, match="total_steps is 0"):
        make_learner(model_dir("qwen3"), 0)
    with pytest.raises(ConfigError, match=r"model\.device is 'warp'"):
        require_device("warp", "model.device")
    assert require_device("cpu", "model.device") == torch.device("cpu")


def test_update_metrics_combine_updates_by_tokens(model_dir: Models, row: Row) -> None:
    learner = make_learner(model_dir("qwen3"), lr=5e-2)
    updates = []
    for length in (8, 20):
        (batch,) = pack([row(length)], 100)
        batch.old_logprobs = batch.rollout_logprobs
        updates.append((learner.forward_backward([batch], PolicyObjective(), 1.0), learner.optim_step()))
    updates.append((learner.forward_backward([], PolicyObjective(), 1.0), learner.optim_step()))
    merge_metrics = update_metrics(updates)
    first, second = updates[0][0], updates[1][0]
    assert merge_metrics["train/tokens"] == 14
    assert merge_metrics["train/updates"] == 2
    assert merge_metrics["train/skipped_updates"] == 1
    for name in ("entropy", "ratio", "approx_kl"):
        expected = (4 * first.means[name] + 10 * second.means[name]) / 14
        assert merge_metrics[f"train/{name}"] == pytest.approx(expected)
    assert merge_metrics["train/loss"] == pytest.approx((4 * first.loss + 10 * second.loss) / 14)
    assert merge_metrics["train/ratio_max"] == max(first.maxima["ratio_max"], second.maxima["ratio_max"])
    assert merge_metrics["train/grad_norm"] == pytest.approx((updates[0][1].grad_norm + updates[1][1].grad_norm) / 2)
    ratios = [result.update_ratio for _, result in updates[:2]]
    assert merge_metrics["train/update_ratio"] == pytest.approx(sum(ratios) / 2)
    assert min(ratios) > 0
    assert merge_metrics["lr/adamw"] == 5e-2
    # The gap is that of equal weights: from before the first update.
    assert merge_metrics["gap/mean"] == first.means["gap_abs"]
    assert merge_metrics["gap/max"] == first.maxima["gap_max"]
    assert [name for name in merge_metrics if meaning(name) is None] == []
    assert meaning("train/nonsense") is None
    assert update_metrics([]) == {"train/tokens": 0.0, "train/updates": 0.0, "train/skipped_updates": 0.0}
    assert finite_metrics({"a": 1, "b": float("nan"), "c": float("inf")}) == {"a": 1.0}
