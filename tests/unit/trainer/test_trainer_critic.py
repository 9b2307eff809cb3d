"""The critic: which layers it moves, alone and with the policy, over any micro-batches, and what it leaves on disk."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.trainer.lookup_run import train_config
from turnwise.errors import CheckpointError, ConfigError, TrainError
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import CriticConfig, ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, TokenScores, TrainRow
from turnwise.trainer.learn.critic import Critic, ValueLearner
from turnwise.trainer.learn.learner import StepResult
from turnwise.trainer.learn.objectives import VALUE_SUMS, PolicyObjective, ValueObjective
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.model.attention import LAYOUT_ARGUMENT, PackedLayout
from turnwise.trainer.observe.metrics import meaning

Row = Callable[..., TrainRow]
Models = Callable[..., Path]
ALGORITHM = AlgorithmConfig.model_validate({"advantage": "gae", "minibatches": 2})


def make(path: Path, kind: str, **critic: Any) -> tuple[TorchLearner, Critic]:
    config = PolicyConfig(
        model=ModelConfig(path=path, device="cpu"),
        optim=OptimConfig(lr=1e-3),
        critic=CriticConfig.model_validate({"kind": kind, "lr": 1e-2, **critic}),
    )
    learner = TorchLearner.create(config, 50)
    opened_critic = Critic.create(config, learner, 50)
    assert opened_critic is not None
    # From zero every layer under the head would have no gradient in the first step.
    torch.manual_seed(5)
    torch.nn.init.normal_(inside(opened_critic).head.linear.weight, std=0.1)
    return learner, opened_critic


def inside(critic: Critic) -> ValueLearner:
    assert isinstance(critic.learner, ValueLearner)
    return critic.learner


@pytest.fixture
def rows(row: Row) -> list[TrainRow]:
    made_rows = []
    for number, length in enumerate((9, 14, 6, 11)):
        plain = row(length, 4, seed=number, name=f"t{number}", advantage=(-1.0) ** number)
        random = np.random.default_rng(number)
        values, returns = (random.normal(size=length).astype(np.float32) for _ in range(2))
        returns[-2] = np.nan  # not asked there
        made_rows.append(dataclasses.replace(plain, values=values, returns=returns))
    return made_rows


def weights(module: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def gradients(module: Any) -> list[Tensor]:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return grads


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def packed(rows: list[TrainRow], budget: int) -> list[MicroBatch]:
    batches = pack(rows, budget)
    for batch in batches:
        batch.old_logprobs = batch.rollout_logprobs
    return batches


def test_values_are_those_of_the_states_that_predict(model_dir: Models, rows: list[TrainRow]) -> None:
    learner, critic = make(model_dir(), "shared")
    [batch] = pack(rows[:1], 100)
    [values] = critic.learner.values([batch])
    with torch.no_grad():
        hidden = learner.policy.model.get_decoder()(input_ids=batch.input_ids, **no_cache(batch)).last_hidden_state[0]
        expected = hidden[batch.predictors] @ inside(critic).head.linear.weight[0] + inside(critic).head.linear.bias
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)
    scores = learner.policy.forward(batch)
    assert scores.values is not None
    torch.testing.assert_close(scores.values, expected, atol=1e-6, rtol=0)
    assert torch.equal(learner.values([batch])[0], values)
    # A head is no weight that a server would want.
    assert not any("linear" in name for name, _ in learner.export_weights())


def no_cache(batch: MicroBatch) -> dict[str, Any]:
    layout = PackedLayout.of(batch.segments, torch.device("cpu"))
    return {"position_ids": batch.position_ids, "use_cache": False, LAYOUT_ARGUMENT: layout}


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_critic_that_learns_alone_leaves_the_policy_unchanged(
    model_dir: Models, rows: list[TrainRow], kind: str
) -> None:
    learner, critic = make(model_dir(), kind)
    initial, head = weights(learner.policy.model), weights(inside(critic).head)
    layers = weights(inside(critic).policy.model)
    metrics = update_policy(
        learner, rows, ALGORITHM, BatchConfig(max_tokens_per_micro_batch=20), seed=1, critic=critic, critic_alone=True
    )
    assert same(initial, weights(learner.policy.model))
    assert learner.steps == 0
    assert critic.steps == 2
    assert not same(head, weights(inside(critic).head))
    assert same(layers, weights(inside(critic).policy.model)) is (kind == "shared")
    assert metrics["train/updates"] == 0
    assert metrics["critic/loss"] > 0
    assert metrics["critic/grad_norm"] > 0
    assert metrics["critic/lr"] == 1e-2
    assert all(meaning(name) for name in metrics)
    # Then both.
    metrics = update_policy(learner, rows, ALGORITHM, BatchConfig(), seed=2, critic=critic)
    assert not same(initial, weights(learner.policy.model))
    assert (learner.steps, critic.steps) == (2, 4)
    assert metrics["train/updates"] == 2
    assert all(meaning(name) for name in metrics)


def test_shared_critic_layers_get_both_gradients_and_a_separate_critic_leaves_the_policy(
    model_dir: Models, rows: list[TrainRow]
) -> None:
    learner, critic = make(model_dir(), "shared", coef=0.25)
    batches, policy = packed(rows, 100), PolicyObjective()
    model = learner.policy.model
    learner.forward_backward(batches, policy, 16.0)
    alone = gradients(model)
    assert all(not gradient.any() for gradient in gradients(inside(critic).head))
    learner.forward_backward(batches, ValueObjective(0.2), 16.0)
    value, head = gradients(model), gradients(inside(critic).head)
    learner.forward_backward(batches, ValueObjective(0.2, coef=0.25, policy=policy), 16.0)
    for total, one, other in zip(gradients(model), alone, value, strict=True):
        torch.testing.assert_close(total, one + 0.25 * other, atol=1e-6, rtol=1e-4)
    for total, other in zip(gradients(inside(critic).head), head, strict=True):
        torch.testing.assert_close(total, 0.25 * other, atol=1e-7, rtol=1e-5)
    assert any(gradient.any() for gradient in value)

    learner, separate = make(model_dir(), "own")
    update_policy(learner, rows, ALGORITHM, BatchConfig(), seed=2, critic=separate)
    twin, _ = make(model_dir(), "own")
    update_policy(twin, rows, ALGORITHM, BatchConfig(), seed=2)
    assert same(weights(learner.policy.model), weights(twin.policy.model))


@pytest.mark.parametrize("kind", [None, "own", "shared"])
def test_changing_is_called_before_any_weights_change(
    model_dir: Models, rows: list[TrainRow], kind: str | None
) -> None:
    learner, critic = make(model_dir(), kind or "own")
    modules = (learner.policy.model, inside(critic).policy.model, inside(critic).head)
    initial = [weights(module) for module in modules]

    def unchanged() -> bool:
        return all(same(weights(module), old) for module, old in zip(modules, initial, strict=True))

    notices: list[bool] = []
    judge = None if kind is None else critic
    update_policy(
        learner, rows, ALGORITHM, BatchConfig(), seed=2, critic=judge, changing=lambda: notices.append(unchanged())
    )
    assert notices[0]
    assert not notices[-1], "before the second optimizer step the first was made"
    assert len(notices) == (2 if kind is None else 4)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_gradients_do_not_depend_on_micro_batches(model_dir: Models, rows: list[TrainRow], kind: str) -> None:
    learner, critic = make(model_dir(), kind)
    outcomes = []
    for budget in (1, 21, 100):
        # Sums of gradients, not steps: those of Adam would hide what is different.
        noted: list[Tensor] = []

        def note(noted: list[Tensor] = noted) -> StepResult:
            noted.extend(gradients(inside(critic).policy.model) + gradients(inside(critic).head))
            return StepResult(0.0, {})

        inside(critic).optim_step = note  # type: ignore[method-assign]
        learner.optim_step = lambda: None  # type: ignore[assignment,return-value,method-assign]
        critic.update(learner, packed(rows, budget), PolicyObjective(), 16.0, alone=False)
        learner.policy.model.zero_grad()
        outcomes.append((noted, critic.metrics()))
    (unsplit, figures) = outcomes[-1]
    assert any(gradient.any() for gradient in unsplit)
    for split, metrics in outcomes[:-1]:
        assert {n: metrics[n] for n in VALUE_SUMS} == pytest.approx({n: figures[n] for n in VALUE_SUMS}, abs=1e-6)
        for got, want in zip(split, unsplit, strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_value_loss_is_the_mean_over_valued_tokens(rows: list[TrainRow]) -> None:
    # 12 of 16 tokens are asked before. Values 0: half the mean square of what should have been said, old values aside.
    [batch] = pack(rows, 100)
    assert batch.returns is not None
    valued = ~batch.returns.isnan()
    assert (batch.trained_tokens, int(valued.sum())) == (16, 12)
    sums = ValueObjective(None, rate=16 / 12)(batch, TokenScores(torch.zeros(16), values=torch.zeros(16)))
    mean = 0.5 * float(batch.returns[valued].square().mean())
    assert float(sums.loss) / 16 == pytest.approx(mean, rel=1e-6)
    assert float(sums.sums["critic/loss"]) / 16 == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_saved_critic_resumes_bit_for_bit(model_dir: Models, rows: list[TrainRow], tmp_path: Path, kind: str) -> None:
    learner, critic = make(model_dir(), kind)
    update_policy(learner, rows, ALGORITHM, BatchConfig(), seed=1, critic=critic)
    learner.save(tmp_path / "c")
    critic.learner.save(tmp_path / "c" / "critic")
    config = PolicyConfig(
        model=ModelConfig(path=model_dir(), device="cpu"), optim=OptimConfig(lr=1e-3),
        critic=CriticConfig.model_validate({"kind": kind, "lr": 1e-2}),
    )  # fmt: skip
    resumed = TorchLearner.create(config, 50, model_path=tmp_path / "c")
    other = Critic.create(config, resumed, 50, directory=tmp_path / "c" / "critic")
    resumed.load(tmp_path / "c")
    assert other is not None
    assert other.steps == critic.steps == 2
    for one, two in ((learner, critic), (resumed, other)):
        update_policy(one, rows, ALGORITHM, BatchConfig(), seed=2, critic=two)
    assert same(weights(inside(critic).head), weights(inside(other).head))
    assert same(weights(inside(critic).policy.model), weights(inside(other).policy.model))
    assert same(weights(learner.policy.model), weights(resumed.policy.model))
    if kind == "own":
        # A saved critic is where another run's may start.
        started = config.model_copy(update={"critic": CriticConfig(path=tmp_path / "c" / "critic")})
        third = Critic.create(started, resumed, 50)
        assert third is not None
        assert third.steps == 0
        assert inside(third).head.linear.weight.any()
    (tmp_path / "c" / "critic" / "critic.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"critic\.pt cannot be read"):
        other.learner.load(tmp_path / "c" / "critic")


def test_a_step_without_a_finite_gradient_is_skipped(model_dir: Models, rows: list[TrainRow]) -> None:
    learner, critic = make(model_dir(), "own")
    initial = weights(inside(critic).head)
    infinite = [dataclasses.replace(row, returns=np.full_like(row.returns, np.inf)) for row in rows]
    inside(critic)._bad_steps = 8
    critic.update(learner, pack(infinite, 100), PolicyObjective(), 16.0, alone=True)
    assert critic.steps == 1
    assert same(initial, weights(inside(critic).head))
    with pytest.raises(TrainError, match=r"10 optimizer steps in a row.*critic\.lr"):
        critic.update(learner, pack(infinite, 100), PolicyObjective(), 16.0, alone=True)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_step_without_rows_changes_nothing(model_dir: Models, kind: str) -> None:
    """Every episode was over before it was the policy's turn, or a correction left nothing."""
    learner, critic = make(model_dir(), kind)
    initial = weights(learner.policy.model)
    for algorithm in (ALGORITHM, AlgorithmConfig(advantage="gae")):
        metrics = update_policy(learner, [], algorithm, BatchConfig(), seed=1, critic=critic)
        assert metrics["train/updates"] == metrics["critic/loss"] == 0
    assert same(initial, weights(learner.policy.model))


def test_a_shared_critic_needs_a_model_to_share(model_dir: Models) -> None:
    config = PolicyConfig(model=ModelConfig(path=model_dir()), critic=CriticConfig(kind="shared"))
    with pytest.raises(TrainError, match=r"kind is shared.*choose own"):
        Critic.create(config, object(), 1)  # type: ignore[arg-type]
    assert Critic.create(PolicyConfig(model=ModelConfig(path=model_dir())), object(), 1) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": {"main": {"critic": None}}}, "needs a critic: give policies.main.critic"),
        ({"algorithm": {"advantage": "rloo"}, "rollout": {"group_size": 2}}, "needs none: remove it"),
        ({"algorithm": {"advantage": "rloo"}}, "a group of one has advantage zero; .* compares no groups"),
        ({"policies": {"main": {"critic": {"warmup_steps": 5}}}}, "warmup_steps is 5 of 5 steps"),
        ({"policies": {"main": {"critic": {"kind": "shared", "path": "x"}}}}, "shared critic is a head"),
        ({"policies": {"main": {"critic": {"coef": 1}}}}, "critic of kind own has a separate loss"),
        ({"policies": {"main": {"critic": {"bootstrap": ["completed"]}}}}, "bootstrap holds completed"),
        ({"algorithm": {"credit": "last"}}, "derives the credit of each token from the critic"),
        ({"algorithm": {"advantage_options": {"lam": 1.5}}}, "lam"),
        ({"algorithm": {"advantage_options": {"lamda": 1}}}, "did you mean .*lam"),
    ],
)
def test_invalid_critic_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fine: dict[str, Any] = {
        "steps": 5, "algorithm": {"advantage": "gae"}, "rollout": {"group_size": 1}, "batch": {"groups": 4},
        "policies": {"main": {"critic": {"kind": "own", "warmup_steps": 2}}},
    }  # fmt: skip
    config = train_config(tmp_path, tmp_path, **fine)
    assert (config.optimizer_steps, config.critic_steps) == (3, 5)
    merged = {
        name: {**value, **changes.get(name, {})} if isinstance(value, dict) else value for name, value in fine.items()
    }
    with pytest.raises((ValueError, ConfigError), match=message):
        train_config(tmp_path, tmp_path, **merged)


def test_a_critic_of_another_vocabulary_is_refused(model_dir: Models, tmp_path: Path) -> None:
    learner, _ = make(model_dir(), "own")
    folders = []
    for name, words in (("mine", {"a": 0, "b": 1}), ("theirs", {"a": 1, "b": 0})):
        folders.append(shutil.copytree(model_dir(), tmp_path / name))
        (folders[-1] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    policy_model, critic_model = folders
    settings = {"model": ModelConfig(path=policy_model, device="cpu"), "critic": CriticConfig(path=critic_model)}
    with pytest.raises(ConfigError, match=r"policies.main.critic.path is .*theirs, whose tokenizer.json has another"):
        Critic.create(PolicyConfig(**settings), learner, 1)


def test_a_custom_estimator_allows_groups_of_one(tmp_path: Path) -> None:
    (tmp_path / "mine_alone.py").write_text("def alone(rewards, groups): ...")
    section = {"advantage": f"{tmp_path / 'mine_alone.py'}:alone"}
    config = train_config(tmp_path, tmp_path, algorithm=section, rollout={"group_size": 1})
    assert not config.algorithm.compares_groups


def test_reinforce_plus_plus_takes_groups_of_one(tmp_path: Path) -> None:
    config = train_config(tmp_path, tmp_path, algorithm={"advantage": "reinforce_plus_plus"}, rollout={"group_size": 1})
    assert config.rollout.group_size == 1
