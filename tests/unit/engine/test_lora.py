"""Adapter-only weight versions: what is served is W0 + alpha / rank B A, however many versions came before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.engine.tiny_lm import make_model, save_model
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.lora import BaseWeights, adapter_chain, merged
from turnwise.engine.weights import read_weights, write_weights
from turnwise.errors import FormatError
from turnwise.inference import wire
from turnwise.inference.wire import BadRequest
from turnwise.model.core import AdapterInfo, TensorEntry, WeightManifest

TARGETS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
INFO = AdapterInfo(rank=2, alpha=6.0, targets=TARGETS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("qwen3"), tmp_path_factory.mktemp("base"))


def adapter(model: torch.nn.Module, seed: int, info: AdapterInfo = INFO) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in info.targets:
        out, into = model.get_submodule(target).weight.shape
        tensors[f"{target}.lora_A.weight"] = torch.randn(info.rank, into, generator=draw)
        tensors[f"{target}.lora_B.weight"] = torch.randn(out, info.rank, generator=draw)
    return tensors


def weights(served: CausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in served._model.state_dict().items()}


def test_the_formula_by_hand() -> None:
    # alpha / rank = 3 / 1; B A = [[1], [2]] [[10, 20]] = [[10, 20], [20, 40]], times 3, plus W0.
    base, down, up = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0]]), torch.tensor([[1.0], [2.0]])
    assert merged(base, down, up, 3.0).tolist() == [[31.0, 62.0], [63.0, 124.0]]
    half = merged(base.bfloat16(), down, up, 3.0)
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [[31.0, 62.0], [63.0, 124.0]]


def test_versions_do_not_add_up_and_other_targets_come_back(directory: Path) -> None:
    model, served = make_model("qwen3"), CausalLM(directory)
    weights_before = weights(served)
    for version in range(40):
        served.load_adapter(adapter(model, version), INFO, version)
    fresh = CausalLM(directory)
    fresh.load_adapter(adapter(model, 39), INFO, 39)
    for name, tensor in weights(served).items():
        assert torch.equal(tensor, weights(fresh)[name]), name
        changed = name.removesuffix(".weight") in TARGETS
        assert torch.equal(tensor, weights_before[name]) is not changed, name
    # A zero adapter is the base, bit for bit; so is a matrix that the next version does not name.
    one = replace(INFO, targets=TARGETS[:1])
    tensors = adapter(model, 3, one)
    tensors[f"{TARGETS[0]}.lora_B.weight"].zero_()
    served.load_adapter(tensors, one, 41)
    for name, tensor in weights(served).items():
        assert torch.equal(tensor, weights_before[name]), name


def test_a_packed_matrix_is_packed_anew(tmp_path: Path) -> None:
    # Large enough for the layout of the CPU's kernels (packed_linear.py).
    model = make_model("llama", hidden_size=512, num_attention_heads=4, intermediate_size=512)
    served = CausalLM(save_model(model, tmp_path))
    info = AdapterInfo(4, 1.0, ("model.layers.0.mlp.up_proj",))
    tensors = adapter(model, 0, info)
    served.load_adapter(tensors, info, 1)
    rows = torch.randn(8, 512)
    layer = served._model.get_submodule(info.targets[0])
    down, up = tensors.values()
    want = rows @ (model.get_submodule(info.targets[0]).weight + 0.25 * up @ down).T
    assert np.abs((layer(rows) - want).numpy()).max() < 1e-3


def test_misfit_adapter_changes_nothing(directory: Path) -> None:
    model, served = make_model("qwen3"), CausalLM(directory)
    weights_before = weights(served)
    valid = adapter(model, 0)
    name = f"{TARGETS[0]}.lora_A.weight"
    cases = {
        r"missing 'model.layers.0.self_attn.q_proj.lora_A.weight'": (
            {k: v for k, v in valid.items() if k != name},
            INFO,
        ),
        r"lora_A.weight has shape \(3, 64\), not \(2, 64\)": ({**valid, name: torch.zeros(3, 64)}, INFO),
        r"unknown name 'more'": ({**valid, "more": torch.zeros(1)}, INFO),
        r"no matrix model.norm.weight": (valid, replace(INFO, targets=("model.norm",))),
        r"two targets are one tied matrix": (
            adapter(model, 0, tied := replace(INFO, targets=("lm_head", "model.embed_tokens"))),
            tied,
        ),
    }
    for message, (tensors, info) in cases.items():
        with pytest.raises(FormatError, match=message):
            served.load_adapter(tensors, info, 1)
    for key, tensor in weights(served).items():
        assert torch.equal(tensor, weights_before[key])
    served.load(dict(make_model("qwen3", 1).state_dict()), 2)
    with pytest.raises(FormatError, match="full weights were replaced since: relaunch it"):
        served.load_adapter(valid, INFO, 3)


def test_manifest_describes_the_tensors(tmp_path: Path) -> None:
    tensors = adapter(make_model("qwen3"), 0)
    manifest = write_weights(tensors.items(), tmp_path, 3, adapter=INFO)
    assert wire.decode_manifest(wire.encode_manifest(manifest)) == manifest
    assert manifest.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert read_weights(manifest).keys() == tensors.keys()
    # 2 x 3 elements of two bytes, 5 of one byte, a scalar of eight: 12 + 5 + 8.
    sizes = (((2, 3), "bfloat16"), ((5,), "float8_e4m3fn"), ((), "int64"), ((0, 4), "bool"))
    entries = tuple(TensorEntry(str(n), shape, dtype, "") for n, (shape, dtype) in enumerate(sizes))
    assert WeightManifest(0, "x", entries).nbytes == 25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (b'"kind":"lora"', "adapter must have kind 'lora'"),
        (b'"rank":2', "rank must be an integer of at least 1"),
        (b'"alpha":6.0', "alpha must be a finite number"),
        (b'"targets":["a"]', "targets must list names"),
    ],
)
def test_a_broken_adapter_is_named(change: bytes, message: str) -> None:
    manifest = WeightManifest(1, "p", (TensorEntry("a", (1,), "float32", "x"),), AdapterInfo(2, 6.0, ("a",)))
    raw = wire.encode_manifest(manifest)
    assert change in raw
    with pytest.raises(BadRequest, match=message):
        wire.decode_manifest(raw.replace(change, change.split(b":")[0] + b":[]"))


def test_a_server_that_is_sent_no_adapter_keeps_no_copy() -> None:
    base = BaseWeights()
    served = {"a.weight": torch.ones(2, 2)}
    info = AdapterInfo(1, 1.0, ("a",))
    assert not base._base
    tensors = {"a.lora_A.weight": torch.ones(1, 2), "a.lora_B.weight": torch.ones(2, 1)}
    seen: list[torch.Tensor] = []
    base.load(served, tensors, info, 1, seen.append)
    assert served["a.weight"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert [tensor is served["a.weight"] for tensor in seen] == [True]
    base.replaced()
    assert not base._base


def test_a_model_directory_without_settings_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"holds no config\.json: name a whole model directory"):
        adapter_chain(tmp_path)
