"""Faster forms of a train step: their numbers are those of the plain one, and what cannot be used is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from support.trainer.varlen_kernel import varlen_kernel
from turnwise.engine.numerics.compilation import CompiledFunction
from turnwise.errors import TrainError
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import Optimization, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.fsdp_learner import check_sharding
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.model import attention, optimizations
from turnwise.trainer.model.blocks import padded_tokens
from turnwise.trainer.model.optimizations import choose_optimizations
from turnwise.trainer.model.policy import ComputeDtype, Policy, load_model

Row = Callable[..., TrainRow]
FAMILIES = ("qwen2", "qwen3", "llama", "mistral_window", "gemma2", "granite")
CPU = torch.device("cpu")


def branching(row: Row, lengths: tuple[int, ...] = (9, 30, 14, 21)) -> list[TrainRow]:
    """Rows of which each two begin alike."""
    rows = []
    for number, length in enumerate(lengths):
        prompt = [(5 * n + number // 2) % 61 for n in range(7)]
        ids = prompt + [(11 * n + number) % 61 for n in range(length)]
        rows.append(row(len(ids), length, seed=number, name=f"t{number}", ids=ids, temperature=0.8))
    return rows


def scored(policy: Policy, rows: list[TrainRow], *, shared: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and entropies of the trained tokens, and the gradients of a sum of both."""
    (batch,) = pack(rows, 1000, share_prefixes=shared)
    with policy.computing():
        scores = policy.forward(batch, entropy=True)
        assert scores.entropy is not None
        (scores.logprobs.sum() + 0.3 * scores.entropy.sum()).backward()
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return torch.stack([scores.logprobs.detach(), scores.entropy.detach()]), gradients


def relative(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The distance of all gradients together, over their length."""
    assert one.keys() == other.keys()
    assert len(one) > 10
    flat, reference = (torch.cat([tensors[name].flatten() for name in other]) for tensors in (one, other))
    return float((flat - reference).norm() / reference.norm())


@pytest.mark.long
@pytest.mark.alike("compiled layers")
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_and_fused_loss_equal_the_eager_ones(
    model_dir: Callable[..., Path], row: Row, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without and with shared prefixes, of two sizes that are padded to one; the vocabulary has several tiles."""
    monkeypatch.setattr("turnwise.trainer.model.chunked_logprobs.HELD_BYTES", 0)
    monkeypatch.setattr("turnwise.trainer.model.chunked_logprobs._TILE_BYTES", 4 * 100 * 20)
    plain = load_model(model_dir(family))
    policy = load_model(model_dir(family), optimizations=["compile", "fused_loss"])
    assert policy.optimizations == {"compile", "fused_loss"}
    for shared, lengths in ((False, (9, 30, 14, 21)), (True, (9, 30, 14, 20))):
        rows = branching(row, lengths)
        (values, gradients), (expected, expected_gradients) = (
            scored(model, rows, shared=shared) for model in (policy, plain)
        )
        torch.testing.assert_close(values, expected, atol=2e-5, rtol=2e-5)
        assert relative(gradients, expected_gradients) < 1e-5
        for model in (policy, plain):
            model.model.zero_grad()
    compiled_before = counters["stats"]["unique_graphs"]
    assert compiled_before > 0
    scored(policy, branching(row, (9, 30, 14, 19)), shared=False)
    assert counters["stats"]["unique_graphs"] == compiled_before


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [True, "matmuls"])
def test_compiled_layers_are_checkpointed(
    model_dir: Callable[..., Path], row: Row, checkpointing: Literal[True, "matmuls"]
) -> None:
    policy = load_model(model_dir("qwen3"), gradient_checkpointing=checkpointing, optimizations=["compile"])
    rows = branching(row)
    values, gradients = scored(policy, rows, shared=True)
    expected, expected_gradients = scored(load_model(model_dir("qwen3")), rows, shared=True)
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
    assert relative(gradients, expected_gradients) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_weights_are_near_float32_and_leave_it(model_dir: Callable[..., Path], row: Row, family: str) -> None:
    policy = load_model(model_dir(family), compute_dtype="bfloat16", optimizations=["bfloat16_weights"])
    rows = branching(row)
    before = {name: tensor.clone() for name, tensor in policy.named_weights()}
    values, gradients = scored(policy, rows, shared=True)
    expected, expected_gradients = scored(load_model(model_dir(family)), rows, shared=True)
    assert 0 < float((values - expected).abs().max()) < 0.2
    assert relative(gradients, expected_gradients) < 0.1
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    for name, tensor in policy.named_weights():
        assert torch.equal(tensor, before[name]), name
    # Gradients of two passes are added in float32.
    _, twice = scored(policy, rows, shared=True)
    assert relative({name: tensor / 2 for name, tensor in twice.items()}, expected_gradients) < 0.1


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_varlen_attention_is_near_float32(model_dir: Callable[..., Path], row: Row, family: str) -> None:
    """Heads of 8 numbers and more, windows, shared key heads; the softcap of gemma2 has another kernel."""
    with varlen_kernel():
        policy = load_model(model_dir(family), compute_dtype="bfloat16", optimizations=["varlen"])
        assert policy.optimizations == {"varlen"}
        rows = branching(row)
        values, gradients = scored(policy, rows, shared=False)
    expected, expected_gradients = scored(load_model(model_dir(family)), rows, shared=False)
    assert 0 < float((values - expected).abs().max()) < 0.2
    assert relative(gradients, expected_gradients) < 0.1


@pytest.mark.long
def test_a_step_with_all_optimizations_learns_what_the_plain_one_does(model_dir: Callable[..., Path], row: Row) -> None:
    rows = branching(row)

    def trained(names: list[Optimization], dtype: ComputeDtype) -> tuple[dict[str, Tensor], TorchLearner]:
        model = {"path": model_dir("qwen3"), "device": "cpu", "compute_dtype": dtype, "optimizations": names}
        config = PolicyConfig.model_validate({"model": model, "optim": {"lr": 1e-3}})
        learner = TorchLearner.create(config, total_steps=10)
        for seed in range(3):
            update_policy(learner, rows, AlgorithmConfig(), BatchConfig(share_prefixes=False), seed=seed)
        return dict(learner.export_weights()), learner

    with varlen_kernel():
        fast, learner = trained(["varlen", "compile", "fused_loss", "bfloat16_weights"], "bfloat16")
        assert len(learner.policy.optimizations) == 4
    plain, _ = trained([], "float32")
    start = dict(load_model(model_dir("qwen3")).named_weights())
    changes = [torch.cat([(weights[name] - start[name]).flatten() for name in start]) for weights in (fast, plain)]
    assert float(torch.cosine_similarity(*changes, dim=0)) > 0.9


@pytest.mark.long
def test_a_function_that_does_not_compile_is_called_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nonexistent/compiler",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)

    def double(tensor: Tensor) -> Tensor:
        return tensor.sin() * 2.0 + 41.0

    function = CompiledFunction(double, dynamic=False)
    with caplog.at_level(logging.WARNING):
        results = [function(torch.zeros(37)) for _ in range(2)]
    assert all(torch.equal(result, torch.full((37,), 41.0)) for result in results)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("turnwise")]
    assert "double is computed without a compiler: InvalidCxxCompiler" in line


def test_what_cannot_be_used_is_left_out_with_one_line_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(optimizations, "varlen_obstacle", lambda device: None)
    monkeypatch.setattr(optimizations, "has_kernels", lambda device: True)
    every: list[Optimization] = ["varlen", "compile", "fused_loss", "bfloat16_weights"]
    assert choose_optimizations(every, CPU, "bfloat16", None) == set(every)
    assert choose_optimizations(None, CPU, "bfloat16", None) == set()
    assert choose_optimizations(None, torch.device("cuda"), "bfloat16", None) == {"varlen", "fused_loss"}
    assert choose_optimizations(None, torch.device("cuda"), "float32", None) == {"fused_loss"}
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert choose_optimizations(every, CPU, "float32", "the model has experts") == {"fused_loss"}
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" is left out, as ")[0].split()[-1] for line in lines] == [
        "varlen", "compile", "bfloat16_weights",
    ]  # fmt: skip
    assert "the model has experts: blocks as they are instead" in lines[1]
    monkeypatch.setattr(optimizations, "has_kernels", lambda device: False)
    assert choose_optimizations(["fused_loss"], torch.device("cuda"), "float32", None) == set()
    assert "there is no Triton for cuda" in caplog.text


def test_a_cpu_has_no_varlen_kernel() -> None:
    attention.varlen_obstacle.cache_clear()
    assert "no such kernel for cpu" in str(attention.varlen_obstacle(CPU))


def test_rows_are_padded_to_eight_sizes_between_powers_of_two() -> None:
    sizes = [padded_tokens(tokens) for tokens in range(1, 4097)]
    assert all(tokens <= size <= max(64, tokens * 1.125) for tokens, size in enumerate(sizes, start=1))
    assert len({size for size in sizes if size > 2048}) == 8
    assert padded_tokens(33_792) == 36_864


def test_bfloat16_weights_are_float32_again_after_a_failed_pass() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1, bias=False))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    dtypes: set[torch.dtype] = set()

    def fail() -> None:
        with optimizations.bfloat16_weights(model):
            dtypes.update(parameter.dtype for parameter in model.parameters())
            raise RuntimeError("a user's loss")

    with pytest.raises(RuntimeError, match="loss"):
        fail()
    assert dtypes == {torch.bfloat16}
    for parameter, weight, gradient in zip(model.parameters(), before, gradients, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)


def test_the_engine_fsdp_names_optimizations_that_it_lacks(model_dir: Callable[..., Path]) -> None:
    config: dict[str, Any] = {"path": model_dir(), "device": "cpu", "optimizations": ["compile", "bfloat16_weights"]}
    with pytest.raises(TrainError, match=r"optimizations has bfloat16_weights.*mixed_precision"):
        check_sharding(PolicyConfig.model_validate({"model": config, "engine": "fsdp"}), {})
