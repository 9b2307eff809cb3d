"""Adapters on frozen matrices of four bits: what is computed, trained, saved and sent, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.families import save_family
from support.engine.scores import served_logprobs
from support.engine.tiny_lm import make_model, save_model
from support.trainer.adapter_steps import logprobs
from turnwise.engine.causal_lm import CausalLM
from turnwise.errors import MissingExtraError, TrainError
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import open_learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective
from turnwise.trainer.learn.rank_processes import Sharding
from turnwise.trainer.model.nf4 import BLOCK, is_nf4, nf4_bytes
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.scale.memory import weight_parts
from turnwise.trainer.scale.shape import ModelShape

Row = Callable[..., TrainRow]


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("torchao")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("qwen3", initializer_range=0.1).to(request.param), tmp_path_factory.mktemp("base"))


@pytest.fixture
def rows(row: Row) -> list[TrainRow]:
    return [row(12, 8, seed=n, name=f"t{n}") for n in range(3)]


def learner_of(base: Path, optimizations: list[str], lora: dict[str, Any] | None = None, **model: Any) -> Any:
    section = {"path": base, "device": "cpu", "lora": lora or {"rank": 4}, "optimizations": optimizations, **model}
    return open_learner(PolicyConfig.model_validate({"model": section, "optim": {"lr": 2e-2}}), 100)


def step(learner: Any, rows: list[TrainRow]) -> float:
    loss: float = learner.forward_backward(pack(rows, 40), CrossEntropyObjective(), 20.0).loss
    learner.optim_step()
    return loss


def linear_layers(learner: Any) -> dict[str, torch.nn.Linear]:
    """Return the base layers under the adapters."""
    return {name: learner.policy.model.get_submodule(name).base_layer for name in learner.adapter.targets}


def test_matrices_are_the_nearest_quantiles_of_their_blocks_in_an_eighth_of_the_bytes(base: Path) -> None:
    learner, plain = learner_of(base, ["nf4_base"]), load_model(base)
    assert len(linear_layers(learner)) == 14
    for name, layer in linear_layers(learner).items():
        assert is_nf4(layer.weight)
        quantized = layer.weight.data.to(torch.float32).reshape(-1, BLOCK)
        original = plain.model.get_parameter(f"{name}.weight").detach().reshape(-1, BLOCK)
        scales = original.abs().amax(1, keepdim=True)
        # Table 4 of QLoRA's appendix: between two levels there are at most 0.31 of a scale, which has 8 bits itself.
        assert float(((quantized - original).abs() / scales).max()) < 0.31 / 2 + 0.02
        parts = [getattr(layer.weight, part) for part in ("quantized_data", "quantized_scalers", "quantization_factor")]
        assert sum(part.nbytes for part in parts) == pytest.approx(nf4_bytes(original.numel()), rel=0.04)
    parameters = dict(learner.policy.model.named_parameters())
    frozen = [parameter for parameter in parameters.values() if not parameter.requires_grad]
    size = sum(nf4_bytes(matrix.numel()) if is_nf4(matrix) else matrix.nbytes for matrix in frozen)
    model = {"path": base, "lora": {"rank": 4}, "optimizations": ["nf4_base"]}
    planned = weight_parts(ModelShape.load(base, "model"), PolicyConfig.model_validate({"model": model}), Sharding(1))
    assert dict(planned)["weights"] == pytest.approx(size)
    others = {name for name, parameter in parameters.items() if not is_nf4(parameter)}
    assert not any(name.endswith("base_layer.weight") for name in others)
    assert "model.embed_tokens.weight" in others


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_adapters_learn_as_on_a_model_of_the_quantized_numbers(
    base: Path, rows: list[TrainRow], tmp_path: Path, compute_dtype: str
) -> None:
    learner = learner_of(base, ["nf4_base"], compute_dtype=compute_dtype)
    learner.save_model(tmp_path / "quantized")
    other = learner_of(tmp_path / "quantized", [], compute_dtype=compute_dtype)
    tolerance = 1e-5 if compute_dtype == "float32" else 0.1
    for _ in range(3):
        torch.testing.assert_close(logprobs(learner, rows), logprobs(other, rows), atol=tolerance, rtol=0)
        torch.testing.assert_close(step(learner, rows), step(other, rows), atol=tolerance, rtol=0)
    for (name, factor), (_, expected) in zip(learner.export_weights(), other.export_weights(), strict=True):
        assert factor.dtype == torch.float32
        if compute_dtype == "float32":
            torch.testing.assert_close(factor, expected, atol=1e-3, rtol=0, msg=name)


def test_servers_get_adapters_for_the_model_as_it_is_and_checkpoints_resume(
    base: Path, rows: list[TrainRow], tmp_path: Path
) -> None:
    learner = learner_of(base, ["nf4_base"])
    for _ in range(3):
        step(learner, rows)
    trained = logprobs(learner, rows)
    server = CausalLM(base, dtype="float32")
    server.load_adapter(dict(learner.export_weights()), learner.adapter, 1)
    learner.save(tmp_path)
    unquantized = learner_of(base, [], {"rank": 4})
    unquantized.load(tmp_path)
    ids, count = rows[0].sample.input_ids, rows[0].sample.trained_tokens
    served = served_logprobs(server, ids)[-count:]
    torch.testing.assert_close(served, logprobs(unquantized, rows)[:count], atol=1e-4, rtol=0)
    # What quantization leaves between both, which runs report as gap/max.
    assert 1e-3 < float((served - trained[:count]).abs().max()) < 1.0
    resumed = learner_of(base, ["nf4_base"])
    resumed.load(tmp_path)
    assert torch.equal(logprobs(resumed, rows), trained)


def test_what_is_not_frozen_or_is_sent_whole_is_not_quantized(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainError, match=r"has nf4_base, but all weights are trained: give model\.lora, or remove"):
        load_model(base, optimizations=["nf4_base"])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torchao", None)
        with pytest.raises(MissingExtraError, match=r"torchao.*turnwise-rl\[nf4\]"):
            learner_of(base, ["nf4_base"])
    mixture = save_family("qwen3_moe", tmp_path)
    with pytest.raises(
        TrainError, match=r"has nf4_base, but adapters on experts are merged for servers, .*: name other"
    ):
        learner_of(mixture, ["nf4_base"], {"targets": ["experts.down_proj"]})
