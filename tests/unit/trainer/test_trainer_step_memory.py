"""A step with less memory: released gradients, offloaded activations, micro-batches that a device has memory for."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch

from turnwise.errors import ConfigError, TrainError
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.losses.core import LossSums
from turnwise.trainer.algorithms.registry import ConfiguredFunction
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import Optimization, PolicyConfig
from turnwise.trainer.config.train import BatchConfig, TrainConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import check_engine
from turnwise.trainer.learn.objectives import PolicyObjective
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.model import optimizations
from turnwise.trainer.model.optimizations import choose_optimizations
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.scale.memory import main_memory
from turnwise.trainer.scale.plan import fit_micro_batch
from turnwise.trainer.scale.shape import ModelShape

Row = Callable[..., TrainRow]
FAMILIES = ("qwen2", "qwen3", "llama", "mistral_window", "gemma2", "granite")


def rows_of(row: Row) -> list[TrainRow]:
    rows = []
    for number, length in enumerate((9, 30, 14, 21)):
        ids = [(5 * n + number // 2) % 61 for n in range(7)] + [(11 * n + number) % 61 for n in range(length)]
        rows.append(row(len(ids), length, seed=number, name=f"t{number}", ids=ids))
    return rows


def learner_of(path: Path, names: list[Optimization], **optim: Any) -> TorchLearner:
    model = {"path": path, "device": "cpu", "optimizations": names}
    config = PolicyConfig.model_validate({"model": model, "optim": {"lr": 1e-3, "weight_decay": 0.1, **optim}})
    return TorchLearner.create(config, total_steps=10)


def trained(learner: TorchLearner, rows: list[TrainRow], **batch: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    metrics: dict[str, float] = {}
    for seed in range(3):
        metrics = update_policy(learner, rows, AlgorithmConfig(), BatchConfig(**batch), seed=seed)
    return dict(learner.export_weights()), metrics


def assert_equal_steps(one: TorchLearner, other: TorchLearner, rows: list[TrainRow], **batch: Any) -> None:
    assert_alike(trained(one, rows, **batch), trained(other, rows, **batch))


def assert_alike(
    result: tuple[dict[str, Tensor], dict[str, float]], other: tuple[dict[str, Tensor], dict[str, float]]
) -> None:
    (weights, metrics), (expected, expected_metrics) = result, other
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=1e-5)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)
    assert metrics["train/update_ratio"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_released_gradients_update_as_those_of_a_plain_step(
    model_dir: Callable[..., Path], row: Row, family: str
) -> None:
    plain, released = (
        learner_of(model_dir(family), names, max_grad_norm=0.01) for names in ([], ["release_gradients"])
    )
    assert_equal_steps(released, plain, rows_of(row))


@pytest.mark.parametrize("optim", [{"max_grad_norm": None}, {"name": "adamw_int8"}])
def test_released_gradients_update_without_clipping_and_with_moments_of_8_bits(
    model_dir: Callable[..., Path], row: Row, optim: dict[str, Any]
) -> None:
    plain, released = (learner_of(model_dir(), names, **optim) for names in ([], ["release_gradients"]))
    assert_equal_steps(released, plain, rows_of(row))


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_released_gradients_of_compiled_layers_update_as_those_of_the_step(
    model_dir: Callable[..., Path], row: Row, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipped, so that each graph's backward pass runs twice; after a step whose graphs torch has in memory."""
    monkeypatch.setattr(functorch, "donated_buffer", True)
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    compiled: list[Optimization] = ["compile", "fused_loss"]
    expected = trained(learner_of(model_dir(family), compiled, max_grad_norm=0.01), rows_of(row))
    released = learner_of(model_dir(family), [*compiled, "release_gradients"], max_grad_norm=0.01)
    assert released.policy.optimizations == {*compiled, "release_gradients"}
    assert_alike(trained(released, rows_of(row)), expected)


def test_several_micro_batches_add_up_gradients_with_one_warning(
    model_dir: Callable[..., Path], row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    plain, released = (learner_of(model_dir(), names) for names in ([], ["release_gradients"]))
    with caplog.at_level(logging.WARNING):
        assert_equal_steps(released, plain, rows_of(row), max_tokens_per_micro_batch=40)
    (line,) = [record.getMessage() for record in caplog.records if "release_gradients" in record.getMessage()]
    assert "raise batch.max_tokens_per_micro_batch" in line


def test_gradients_are_never_there_together(model_dir: Callable[..., Path], row: Row) -> None:
    """At most those of the embedding, which is the output matrix too, and of one parameter beside it."""
    peaks = []
    for names in ([], ["release_gradients"]):
        policy = load_model(model_dir(), optimizations=names)
        parameters = list(policy.model.parameters())
        sizes = [0]

        def measure(_: Tensor, parameters: list[Any] = parameters, sizes: list[int] = sizes) -> None:
            sizes.append(sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None))

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(measure)
        config = PolicyConfig.model_validate({"model": {"path": model_dir()}})
        learner = TorchLearner(policy, config, total_steps=10)
        update_policy(learner, rows_of(row), AlgorithmConfig(), BatchConfig(), seed=0)
        peaks.append(max(sizes))
    all_bytes = sum(parameter.nbytes for parameter in parameters)
    assert peaks == [all_bytes, max(parameter.nbytes for parameter in parameters)]


def test_a_gradient_that_is_not_finite_updates_nothing(model_dir: Callable[..., Path], row: Row) -> None:
    learner = learner_of(model_dir(), ["release_gradients"])
    before = {name: tensor.clone() for name, tensor in learner.export_weights()}
    loss = ConfiguredFunction("broken", lambda logprobs, *_, **__: LossSums(logprobs.sum() * float("inf")), {})
    learner.forward_backward(pack(rows_of(row), 1000), PolicyObjective(loss), 1.0)
    assert learner.optim_step().skipped == "non_finite"
    assert learner.skipped["non_finite"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.export_weights())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optim": {"name": "muon"}}, "optim.name is muon"),
        ({"critic": {"kind": "shared"}}, "critic.kind is shared"),
        ({}, "bfloat16_weights"),
    ],
)
def test_what_needs_all_gradients_is_refused_before_the_run(
    model_dir: Callable[..., Path], keys: dict[str, Any], message: str
) -> None:
    names = ["release_gradients", *(["bfloat16_weights"] if not keys else [])]
    model = {"path": model_dir(), "compute_dtype": "bfloat16", "optimizations": names}
    with pytest.raises(TrainError, match=message):
        check_engine(PolicyConfig.model_validate({"model": model, **keys}))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_offloaded_activations_give_the_gradients_of_kept_ones(
    model_dir: Callable[..., Path], row: Row, family: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizations, "_LEAST_OFFLOADED", 0)
    (batch,) = pack(rows_of(row), 1000, share_prefixes=True)
    results = []
    for names in (set[Optimization](), {"offload_activations"}):
        policy = load_model(model_dir(family), gradient_checkpointing=checkpointing)
        # On a CPU it is left out, as there is nothing to gain.
        policy.optimizations |= names
        policy.forward(batch).logprobs.sum().backward()
        results.append([p.grad for p in policy.model.parameters() if p.grad is not None])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_offloaded_activations_are_those_that_the_plan_counts(
    model_dir: Callable[..., Path], row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What layers save is copied, and is no longer there itself."""
    monkeypatch.setattr(optimizations, "_LEAST_OFFLOADED", 0)
    policy = load_model(model_dir("qwen3"), gradient_checkpointing=True)
    copies: list[Tensor] = []
    inputs: list[weakref.ref[Any]] = []
    empty = torch.empty_like

    def noted(*sizes: Any, **options: Any) -> Tensor:
        tensor = empty(*sizes, **options)
        if "pin_memory" in options:
            copies.append(tensor)
        return tensor

    def note(_: Any, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(weakref.ref(arguments[0]))

    for layer in policy.model.model.layers:
        layer.register_forward_pre_hook(note)
    monkeypatch.setattr(torch, "empty_like", noted)
    (batch,) = pack(rows_of(row), 1000, share_prefixes=True)
    with optimizations.offloading(policy.model):
        states = policy.states(batch)
    gc.collect()
    assert len(inputs) == len(policy.model.model.layers)
    assert not any(reference() is not None for reference in inputs)
    shape = ModelShape.load(model_dir("qwen3"), "model")
    model = {"path": model_dir("qwen3"), "gradient_checkpointing": True, "optimizations": ["offload_activations"]}
    config = run_of(model_dir("qwen3"), max_tokens_per_micro_batch=batch.tokens)
    config = config.model_copy(update={"policies": {"main": PolicyConfig.model_validate({"model": model})}})
    layers = [copy for copy in copies if copy.shape == (1, batch.tokens, shape.hidden)]
    expected = dict(main_memory(config, shape))["activations until the backward pass"]
    assert expected == shape.layers * layers[0].nbytes
    # And what the last norm saves, which the plan counts on the device.
    assert 0 < sum(copy.nbytes for copy in layers) - expected < 4 * layers[0].nbytes
    states.sum().backward()


def test_a_cpu_offloads_nothing_and_a_gpu_does(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_optimizations(["offload_activations"], torch.device("cpu"), "float32", None) == set()
    assert "offload_activations is left out, as they are in main memory already" in caplog.text
    names: list[Optimization] = ["offload_activations", "release_gradients"]
    assert choose_optimizations(names, torch.device("cuda"), "float32", None) == set(names)


# Micro-batches.


def run_of(path: Path, **batch: Any) -> TrainConfig:
    return TrainConfig.model_validate({
        "name": "run",
        "steps": 1,
        "policies": {"main": {"model": {"path": path}}},
        "rollout": {"env": {"name": "lookup"}, "max_turns": 4, "max_tokens_per_turn": 64},
        "inference": {"kv_tokens": 4096},
        "batch": batch,
    })  # fmt: skip


def test_micro_batches_are_as_large_as_the_memory_of_a_gpu(model_dir: Callable[..., Path]) -> None:
    path = model_dir("qwen3")
    sizes = []
    for gpu_bytes in (100_000_000, 200_000_000, 1 << 37):
        config, line = fit_micro_batch(run_of(path), gpu_bytes)
        sizes.append(config.batch.micro_batch)
        assert line is not None
        assert f"micro-batches of up to {sizes[-1]:,} tokens" in line
    assert 1024 <= sizes[0] < sizes[1] < sizes[2] == 1 << 17
    assert sizes[0] % 1024 == 0


def test_a_configured_micro_batch_is_used_where_it_fits(model_dir: Callable[..., Path]) -> None:
    path = model_dir("qwen3")
    fitting = fit_micro_batch(run_of(path), 100_000_000)[0].batch.micro_batch
    config, line = fit_micro_batch(run_of(path, max_tokens_per_micro_batch=fitting), 100_000_000)
    assert (config.batch.micro_batch, line) == (fitting, None)
    config, line = fit_micro_batch(run_of(path, max_tokens_per_micro_batch=fitting + 1), 100_000_000)
    assert config.batch.micro_batch == fitting
    assert f"max_tokens_per_micro_batch is {fitting + 1:,}, which does not fit" in str(line)
    assert str(line).endswith("instead")


def test_memory_for_no_micro_batch_is_an_error_with_what_takes_it(model_dir: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"no micro-batch fits, not even one of 1,024 tokens.*largest: .*set "):
        fit_micro_batch(run_of(model_dir("qwen3")), 5_000_000)


def test_a_cpu_keeps_its_micro_batch(model_dir: Callable[..., Path]) -> None:
    config = run_of(model_dir("qwen3"))
    if torch.accelerator.current_accelerator(check_available=True) is None:
        assert fit_micro_batch(config) == (config, None)
    assert config.batch.micro_batch == 4096
