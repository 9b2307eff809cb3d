"""The KL penalty: what it takes from rewards, what it adds to the loss, its coefficient, and who is asked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from turnwise.errors import ConfigError
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.kl import KLConfig, KLTerm, reward_penalties
from turnwise.trainer.algorithms.rewards import with_penalties
from turnwise.trainer.batch.experience import StepTrajectories, build_experience, collect
from turnwise.trainer.batch.packing import pack, recompute_logprobs
from turnwise.trainer.batch.value_targets import TrajectoryValues
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig, TrainConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import StepResult
from turnwise.trainer.learn.reference import KLGuard, open_reference, reference_path
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.observe.metrics import meaning
from turnwise.trainer.run.checkpoint import CheckpointStore, TrainerState, load_state
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup, to_samples

Row = Callable[..., TrainRow]
Models = Callable[..., Path]
BATCH = BatchConfig(max_tokens_per_micro_batch=64)


def trajectory(name: str, reward: float, *, branches: int = 1) -> Trajectory:
    """Two turns of two tokens in a line; with two branches both turns begin at the root. Log-probabilities -1."""

    def context(index: int, parent: int) -> Segment:
        return Segment(index, parent, "context", np.arange(2, dtype=np.int32))

    def sampled(index: int, parent: int) -> Segment:
        return Segment(
            index, parent, "sampled", np.arange(2, dtype=np.int32), turn_id=f"{name}.{index}",
            logprobs=-np.ones(2, np.float32), weight_versions=((0, 0, 2),), finish_reason="stop",
        )  # fmt: skip

    segments = [context(0, -1), sampled(1, 0), context(2, 1 if branches == 1 else -1), sampled(3, 2)]
    return Trajectory(name, name, "g", "t", segments=segments, rewards=[(None, "score", reward)])


def collected(*members: Trajectory) -> StepTrajectories:
    return collect([TrajectoryGroup("g", "t", list(members))])


def test_reward_penalties_by_hand() -> None:
    # k1: log p - log p_ref = 1, -0.5 | 2; times 0.1. Mean 2.5 / 3; two trajectories pay 0.25 / 2 on average.
    logprobs = {("a", 1): torch.tensor([-1.0, -1.0]), ("b", 1): torch.tensor([-1.0])}
    ref = {("a", 1): torch.tensor([-2.0, -0.5]), ("b", 1): torch.tensor([-3.0])}
    penalties = reward_penalties(logprobs, ref, estimator="k1", coef=0.1)
    assert {key: value.tolist() for key, value in penalties.tokens.items()} == {
        ("a", 1): pytest.approx([0.1, -0.05]),
        ("b", 1): pytest.approx([0.2]),
    }
    assert (penalties.kl, penalties.mean) == (pytest.approx(2.5 / 3), pytest.approx(0.125))
    # k2: 1/2, 1/8, 2.
    assert reward_penalties(logprobs, ref, estimator="k2", coef=1.0).kl == pytest.approx(2.625 / 3)
    assert reward_penalties({}, {}, estimator="k3", coef=1.0).kl == 0.0


@pytest.mark.parametrize("branches", [1, 2])
def test_turn_rewards_are_reduced_by_the_penalties_of_their_tokens(branches: int) -> None:
    one = trajectory("a", 1.0, branches=branches)
    samples = to_samples(one).rows
    assert len(samples) == branches
    # Turns pay 0.1 + 0.2 and 0.3 + 0.4, wherever their tokens stand.
    paid = [0.1, 0.2, 0.3, 0.4]
    tokens = {sample.key: torch.tensor(paid[4 // branches * n :][: 4 // branches]) for n, sample in enumerate(samples)}
    [penalised] = with_penalties([one], [samples], tokens)
    assert penalised.rewards == [
        (None, "score", 1.0),
        ("a.1", "kl", pytest.approx(-0.3)),
        ("a.3", "kl", pytest.approx(-0.7)),
    ]
    assert (penalised.reward, one.reward) == (pytest.approx(0.0, abs=1e-6), 1.0)


def guard(config: dict[str, Any], reference: Any, **fields: Any) -> KLGuard:
    settings = KLConfig.model_validate({"coef": 0.5, **config})
    return KLGuard(settings, settings.coef, reference.logprobs, BATCH, 1.0, **{"recompute": False, **fields})


class Fixed:
    """A reference that says the same of every token but the first of its first batch."""

    def logprobs(self, batches: list[Any]) -> list[Tensor]:
        logprobs = [torch.full((batch.trained_tokens,), -1.0) for batch in batches]
        for first in logprobs[:1]:
            first[0] = -1.5
        return logprobs


def test_reward_penalty_gives_equal_rewards_a_gradient() -> None:
    """Equal rewards, but one trajectory's first token is likelier than in the reference by 0.5: it pays 0.25."""
    batch = collected(trajectory("a", 1.0), trajectory("b", 1.0))
    algorithm = AlgorithmConfig(advantage_options={"norm_by_std": False})
    assert build_experience(batch, algorithm, temperature=1.0).rows == []
    kl_guard = guard({"where": "reward", "estimator": "k1"}, Fixed())
    penalised = kl_guard.reward_penalties(batch, None)  # type: ignore[arg-type]
    experience = build_experience(penalised, algorithm, temperature=1.0)
    # Rewards 0.75 and 1: -+ 0.125.
    assert [row.advantage for row in experience.rows] == [pytest.approx(-0.125), pytest.approx(0.125)]
    assert experience.metrics["kl/value"] == pytest.approx(0.5 / 8)
    assert experience.metrics["kl/penalty"] == pytest.approx(0.125)
    # What the environment paid is logged as it was.
    assert (experience.metrics["reward/mean"], experience.metrics["reward/std"]) == (1.0, 0.0)
    # By turns, only the first one's worth falls: b's turns and a's second are worth 1, a's first 0.75.
    by_turn = AlgorithmConfig.model_validate({"advantage_options": {"norm_by_std": False}, "credit": "turns"})
    [first, second] = build_experience(penalised, by_turn, temperature=1.0).rows
    mask = first.sample.loss_mask
    assert np.asarray(first.advantage)[mask].tolist() == pytest.approx([-0.1875, -0.1875, 0.0625, 0.0625])
    assert np.asarray(second.advantage)[mask].tolist() == pytest.approx([0.0625] * 4)
    assert kl_guard.term(experience.rows) is None


def test_the_coefficient_stays_without_sampled_tokens() -> None:
    kl_guard = guard({"where": "reward", "estimator": "k1", "target": 0.1}, Fixed())
    penalised = kl_guard.reward_penalties(collected(), None)  # type: ignore[arg-type]
    assert kl_guard.step(penalised.metrics) == {"kl/coef": 0.5}
    assert kl_guard.coef == 0.5


@pytest.mark.parametrize("branches", [1, 2])
def test_with_a_critic_penalties_are_subtracted_token_by_token(branches: int) -> None:
    """A critic that expects nothing: advantages are what is still to come, 1 at the end less what tokens pay."""
    batch = collected(trajectory("a", 1.0, branches=branches))
    samples = batch.samples[0]
    paid = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).reshape(branches, -1)
    penalised = replace(batch, penalties={sample.key: paid[number] for number, sample in enumerate(samples)})
    values = [TrajectoryValues([np.zeros(4 // branches, np.float32) for _ in samples])]
    config = AlgorithmConfig.model_validate({"advantage": "gae", "advantage_options": {"whiten": False}})
    experience = build_experience(penalised, config, temperature=1.0, values=values)
    advantages = np.concatenate([np.asarray(row.advantage)[row.sample.loss_mask] for row in experience.rows])
    # 1 - (0.1 + 0.2 + 0.3 + 0.4), 1 - 0.9, 1 - 0.7, 1 - 0.4.
    assert advantages.tolist() == pytest.approx([0.0, 0.1, 0.3, 0.6], abs=1e-6)


def test_the_adapted_coefficient_is_restored_from_a_checkpoint(tmp_path: Path) -> None:
    kl_guard = guard({"target": 0.1}, Fixed())
    # 0.3 is three times the target: the error is cut off at 0.2; 0.5 * (1 + 0.2 * 1,000 / 10,000).
    assert kl_guard.step({"kl/value": 0.3, "batch/trajectories": 1000.0}) == {"kl/coef": 0.5}
    assert kl_guard.coef == pytest.approx(0.51)
    # Nothing was measured (every group taught nothing): nothing is adapted.
    assert kl_guard.step({"batch/trajectories": 10.0}) == {"kl/coef": kl_guard.coef}
    kl_guard.coef = 0.1 + 0.2  # No short decimal.
    path = CheckpointStore(tmp_path).save(TrainerState(1, kl_coefs={"main": kl_guard.coef}), lambda _: None)
    assert load_state(path).kl_coefs == {"main": kl_guard.coef}
    fixed = guard({}, Fixed())
    fixed.step({"kl/value": 9.0, "batch/trajectories": 10.0})
    assert fixed.coef == 0.5


class Watched:
    """A learner that keeps its gradients in the place of taking a step."""

    def __init__(self, path: Path) -> None:
        self.learner = TorchLearner.create(PolicyConfig(model=ModelConfig(path=path, device="cpu")), 10)
        self.forward_backward, self.logprobs = self.learner.forward_backward, self.learner.logprobs
        self.gradients: list[Tensor] = []

    def optim_step(self) -> StepResult:
        gradients = [p.grad.flatten() for p in self.learner.policy.model.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(gradients))
        self.learner.policy.model.zero_grad()
        return StepResult(0.0, {})


@pytest.fixture
def rows(row: Row) -> list[TrainRow]:
    return [row(6 + n, 2 + n, seed=n, name=f"t{n}", advantage=(1.0, 0.0, -0.5)[n]) for n in range(3)]


def update(path: Path, rows: list[TrainRow], term: KLTerm | None, budget: int = 64, **algorithm: Any):
    watched = Watched(path)
    config = AlgorithmConfig.model_validate(
        {"old_logprobs": "recompute", "kl": term and {"coef": term.coef, "estimator": term.estimator}, **algorithm}
    )
    batch = BatchConfig(max_tokens_per_micro_batch=budget)
    return update_policy(watched, rows, config, batch, seed=0, kl=term), watched.gradients  # type: ignore[arg-type]


def term_of(rows: list[TrainRow], path: Path, estimator: str = "k2", coef: float = 0.3) -> KLTerm:
    policy = PolicyConfig(model=ModelConfig(path=path, device="cpu"))
    reference = open_reference(KLConfig(coef=coef), policy, Plain())
    return KLTerm(estimator, coef, recompute_logprobs(reference, rows, BATCH))


class Plain:
    """A learner without its initial weights."""

    def initial_weights(self) -> None:
        return None


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"])
def test_the_loss_term_adds_the_gradient_of_the_penalty(
    model_dir: Models, rows: list[TrainRow], estimator: str
) -> None:
    term = term_of(rows, model_dir(seed=1), estimator)
    metrics, [with_kl] = update(model_dir(), rows, term)
    _, [without] = update(model_dir(), rows, None)
    # By hand: over all 9 tokens, also those of the row without an advantage, d(KL)/d(log p) of each, over 9.
    slopes: dict[str, Callable[[Tensor], Tensor]] = {
        "k1": torch.ones_like, "abs": torch.sign, "k2": lambda d: d, "k3": lambda d: 1 - (-d).exp(),
        "k1+": lambda d: d, "abs+": lambda d: d, "k3+": lambda d: d,
    }  # fmt: skip
    learner = TorchLearner.create(PolicyConfig(model=ModelConfig(path=model_dir(), device="cpu")), 10)
    [micro] = pack(rows, 64)
    ref = torch.cat([term.ref_logprobs[rows[index].sample.key] for index in micro.rows])
    logprobs = learner.policy.forward(micro).logprobs
    assert len(logprobs) == 9
    (0.3 / 9 * slopes[estimator](logprobs.detach() - ref) * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.flatten() for p in learner.policy.model.parameters() if p.grad is not None])
    torch.testing.assert_close(with_kl - without, expected, atol=1e-6, rtol=1e-4)
    values = {"k1": lambda d: d, "abs": torch.abs, "k2": lambda d: d * d / 2, "k3": lambda d: (-d).exp() - 1 + d}
    value = values[estimator.removesuffix("+")](logprobs.detach() - ref).clamp(
        max=10 if "k3" in estimator else math.inf
    )
    assert metrics["kl/value"] == pytest.approx(value.mean().item(), rel=1e-4)
    assert "train/kl" not in metrics
    assert [name for name in metrics if meaning(name) is None] == []


def test_the_loss_term_ignores_splits_and_rejected_tokens(model_dir: Models, rows: list[TrainRow]) -> None:
    term = term_of(rows, model_dir(seed=1))
    _, [unsplit] = update(model_dir(), rows, term)
    _, [split] = update(model_dir(), rows, term, budget=1)
    torch.testing.assert_close(split, unsplit, atol=1e-6, rtol=1e-5)
    # What a correction rejects pays nothing either: the rest keeps its own reference.
    reject = {"weights": "none", "reject": [{"statistic": "k1", "level": "token", "high": 2.0}]}
    metrics, [_] = update(model_dir(), rows, term, correction=reject)
    assert 0 < metrics["correction/rejected"] < 1
    assert metrics["train/tokens"] == pytest.approx(9 * (1 - metrics["correction/rejected"]))


def test_the_reference_keeps_the_initial_weights(model_dir: Models, rows: list[TrainRow]) -> None:
    config = PolicyConfig(model=ModelConfig(path=model_dir(), device="cpu"), optim=OptimConfig(lr=0.01))
    learner = TorchLearner.create(config, 10)
    kl_guard = KLGuard.open(
        TrainConfig.model_validate({
            "name": "r", "steps": 1, "tasks": "a.b:c", "policies": {"main": config.model_dump()},
            "rollout": {"env": {"name": "lookup"}}, "algorithm": {"kl": {"coef": 0.1, "offload": True}},
        }),
        learner,
        0.7,
    )  # fmt: skip
    assert kl_guard is not None
    assert kl_guard.coef == 0.7
    first = kl_guard.term(rows)
    assert first is not None
    # At the start it says what the policy does: the penalty is exactly 0.
    logprobs = recompute_logprobs(learner.logprobs, rows, BATCH)
    assert all(torch.equal(logprobs[key], value) for key, value in first.ref_logprobs.items())
    assert (
        update_policy(learner, rows, AlgorithmConfig(kl=KLConfig(coef=0.1)), BATCH, seed=0, kl=first)["kl/value"] == 0
    )
    rescored = kl_guard.term(rows)
    assert rescored is not None
    assert all(torch.equal(rescored.ref_logprobs[key], value) for key, value in first.ref_logprobs.items())
    moved = recompute_logprobs(learner.logprobs, rows, BATCH)
    assert any(not torch.equal(moved[key], value) for key, value in logprobs.items())


def test_initial_weights_in_the_engine_serve_as_the_reference() -> None:
    class Adapted:
        """A learner whose adapters can be switched off."""

        on = True

        @contextmanager
        def initial_weights(self):
            self.on = False
            yield
            self.on = True

        def logprobs(self, batches):
            return [torch.tensor([-1.0 if self.on else -2.0])]

    learner: Any = Adapted()
    reference = open_reference(KLConfig(coef=0.1), PolicyConfig(model=ModelConfig(path=Path("nowhere"))), learner)
    assert reference([])[0].item() == -2.0
    assert learner.on


def test_a_reference_with_another_vocabulary_raises_config_error(tmp_path: Path) -> None:
    def model(name: str, vocabulary: dict[str, int] | None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if vocabulary is not None:
            text = orjson.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"content": "<e>", "id": 9}]})
            (folder / "tokenizer.json").write_bytes(text)
        return folder

    trained = ModelConfig(path=model("mine", {"a": 0, "b": 1}))
    for other in (model("same", {"b": 1, "a": 0}), model("untold", None)):
        assert reference_path(KLConfig(coef=1, reference=other), trained) == other
    assert reference_path(KLConfig(coef=1), trained) == trained.path
    with pytest.raises(ConfigError, match="has another vocabulary than that of"):
        reference_path(KLConfig(coef=1, reference=model("other", {"a": 1, "b": 0})), trained)
    with pytest.raises(ConfigError, match=r"algorithm.kl.reference is .*gone: there is no such folder"):
        reference_path(KLConfig(coef=1, reference=tmp_path / "gone"), trained)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kl": {"coef": 0.1, "estimator": "k4"}}, "estimator is 'k4'; known: k1, abs, k2, k3, k1+"),
        ({"kl": {"coef": 0.1, "estimator": "k3+", "where": "reward"}}, "a reward has no gradient that + could change"),
        ({"kl": {"coef": 0.0}}, "greater than 0"),
        ({"kl": {"coef": 0.1, "where": "reward"}, "advantage": "gdpo"}, "set it to loss"),
    ],
)
def test_invalid_kl_configuration_raises_validation_error(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        AlgorithmConfig.model_validate(section)


def test_rows_without_advantage_are_skipped_unless_penalised_in_the_loss() -> None:
    assert AlgorithmConfig().idle_at_zero
    assert not AlgorithmConfig(kl=KLConfig(coef=0.1)).idle_at_zero
    assert AlgorithmConfig(kl=KLConfig(coef=0.1, where="reward")).idle_at_zero
