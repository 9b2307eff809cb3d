"""Adapters: what trains, what is exported, saved and served of them, and that all of it is one model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.engine.families import save_family
from support.engine.scores import served_logprobs
from support.engine.tiny_lm import make_model, save_model
from support.trainer.adapter_steps import logprobs, trained
from turnwise.engine.capacity import serves_float32
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.lora import ADAPTER_CONFIG, adapter_chain, base_digests, is_adapter, model_under, read_adapter
from turnwise.errors import CheckpointError, FormatError, InferenceError, TrainError
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import LoRAConfig, PolicyConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import open_learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective
from turnwise.trainer.model.policy import load_model, try_adapters
from turnwise.trainer.run.export import export_model


@pytest.fixture(scope="module", autouse=True)
def peft() -> Any:
    return pytest.importorskip("peft")


Row = Callable[..., TrainRow]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("qwen3", initializer_range=0.1), tmp_path_factory.mktemp("base"))


def learner_of(base: Path, lora: dict[str, Any] | None = None, **model: Any) -> Any:
    section = {"path": base, "device": "cpu", "lora": {"rank": 4, **(lora or {})}, **model}
    return open_learner(PolicyConfig.model_validate({"model": section, "optim": {"lr": 2e-2}}), 100)


@pytest.fixture
def rows(row: Row) -> list[TrainRow]:
    return [row(12, 8, seed=n, name=f"t{n}") for n in range(3)]


def test_only_adapters_train_and_start_at_zero(base: Path, rows: list[TrainRow]) -> None:
    learner = learner_of(base)
    plain = load_model(base)
    with torch.no_grad():
        untrained = torch.cat([plain.forward(batch).logprobs for batch in pack(rows, 1000)])
    assert torch.equal(logprobs(learner, rows), untrained)
    trained(learner, rows)
    assert not torch.allclose(logprobs(learner, rows), untrained, atol=1e-3)
    with learner.initial_weights():
        assert torch.equal(logprobs(learner, rows), untrained)
    # Back again, and trainable again.
    assert not torch.allclose(logprobs(learner, rows), untrained, atol=1e-3)
    assert learner.forward_backward(pack(rows, 40), CrossEntropyObjective(), 20.0).loss > 0
    assert learner.optim_step().grad_norm > 0
    weights = dict(plain.named_weights())
    targets = {f"{name}.weight" for name in learner.adapter.targets}
    # All linear layers but the output matrix: seven in each of two layers.
    assert len(targets) == 14
    for name, tensor in learner.policy.named_weights():
        assert torch.equal(tensor, weights[name]) is (name not in targets), name
    exported = dict(learner.export_weights())
    assert len(exported) == 28
    # rank x (in + out) elements for each target, and nothing else.
    assert sum(tensor.numel() for tensor in exported.values()) == sum(4 * sum(weights[name].shape) for name in targets)


def test_server_trainer_peft_and_merged_model_agree(
    base: Path, rows: list[TrainRow], tmp_path: Path, peft: Any
) -> None:
    learner = trained(learner_of(base, {"alpha": 3.0}), rows, 4)
    want = logprobs(learner, rows)
    learner.save(tmp_path / "saved")
    learner.save_model(tmp_path / "merged")
    assert is_adapter(tmp_path / "saved")
    assert not is_adapter(tmp_path / "merged")
    for directory in ("saved", "merged"):
        policy = load_model(tmp_path / directory)
        with torch.no_grad():
            scores = torch.cat([policy.forward(batch).logprobs for batch in pack(rows, 1000)])
        assert float((scores - want).abs().max()) < 1e-5, directory
    ids = rows[0].sample.input_ids
    expected = want[: rows[0].sample.trained_tokens]
    running = CausalLM(base)
    running.load_adapter(dict(learner.export_weights()), learner.adapter, 1)
    for server in (running, CausalLM(tmp_path / "saved"), CausalLM(tmp_path / "merged")):
        # Invariant 12.
        assert float((served_logprobs(server, ids)[-len(expected) :] - expected).abs().max()) < 1e-4
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "saved"))
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
    theirs = logits.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    assert float((theirs[-len(expected) :] - expected).abs().max()) < 1e-4


def test_a_target_whose_matrix_is_used_without_calling_it_is_refused(base: Path, monkeypatch: Any) -> None:
    def borrowed(self: Any, states: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.linear(states, self.gate_proj.weight)
        return self.down_proj(self.act_fn(gate) * self.up_proj(states))

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward", borrowed)
    with pytest.raises(
        TrainError, match=r"targets holds model\.layers\.0\.mlp\.gate_proj, whose matrix .* without call"
    ):
        learner_of(base)
    learner_of(base, {"targets": ["q_proj"]})


def test_packing_is_exact_with_trained_adapters(base: Path, rows: list[TrainRow]) -> None:
    learner = trained(learner_of(base, gradient_checkpointing=True), rows, 4)
    alone = torch.cat([logprobs(learner, [row]) for row in rows])
    assert float((alone - logprobs(learner, rows)).abs().max()) < 1e-5


def test_new_adapters_are_equal_and_a_saved_adapter_continues(base: Path, rows: list[TrainRow], tmp_path: Path) -> None:
    first = dict(learner_of(base).export_weights())
    torch.manual_seed(5)
    second = dict(learner_of(base).export_weights())
    assert all(torch.equal(first[name], second[name]) for name in first)
    learner = trained(learner_of(base, {"alpha": 3.0, "targets": ["q_proj", "v_proj"]}), rows)
    learner.save(tmp_path)
    later = learner_of(base, {"path": tmp_path, "rank": None})
    assert torch.equal(logprobs(later, rows), logprobs(learner, rows))
    assert later.adapter == learner.adapter
    # Without them it would not be what training began with.
    assert later.initial_weights() is None
    trained(later, rows, 1)
    # A model that is an adapter's folder, with adapters on it.
    nested = learner_of(tmp_path)
    assert float((logprobs(nested, rows) - logprobs(learner, rows)).abs().max()) < 1e-5
    trained(nested, rows, 1).save(tmp_path / "nested")
    chain = adapter_chain(tmp_path / "nested")
    assert (chain[0], [adapter.path for adapter in chain[1]]) == (base, [tmp_path, tmp_path / "nested"])


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"targets": ["q_project"]}, r"model\.lora\.targets is \['q_project'\]: .*not found"),
        ({"targets": ["lm_head"]}, r"lm_head is the output matrix, which cannot be a target"),
        ({"targets": ["embed_tokens"]}, r"embed_tokens is not a linear layer"),
        ({"path": "nowhere"}, r"model\.lora\.path is .*nowhere.* cannot be read as the settings of an adapter"),
    ],
)
def test_unadaptable_targets_raise_train_error(base: Path, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        learner_of(base, lora)


def test_broken_and_mismatched_adapters_are_refused(base: Path, rows: list[TrainRow], tmp_path: Path) -> None:
    learner_of(base).save(tmp_path)
    with pytest.raises(CheckpointError, match="an adapter of another rank or other targets"):
        learner_of(base, {"rank": 2}).load(tmp_path)
    with pytest.raises(TrainError, match=r"model\.lora\.rank is 2, but the adapter in model\.lora\.path has 4"):
        learner_of(base, {"rank": 2, "path": tmp_path})
    settings = tmp_path / ADAPTER_CONFIG
    text = settings.read_text()
    for old, new, message in (
        ('"use_dora": false', '"use_dora": true', "sets use_dora: only plain LoRA can be read"),
        (str(base), "/gone", "says base_model_name_or_path '/gone', which does not exist"),
    ):
        assert old in text
        settings.write_text(text.replace(old, new))
        with pytest.raises(FormatError, match=message):
            read_adapter(tmp_path)
    # alpha / sqrt(rank): 8 / 2 is what alpha 16 is over rank 4.
    settings.write_text(text.replace('"use_rslora": false', '"use_rslora": true'))
    assert read_adapter(tmp_path).info.scale == 4.0
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks adapter_model\.safetensors"):
        learner_of(base).load(tmp_path)


def test_adapters_are_refused_on_a_model_that_changed_since(base: Path, tmp_path: Path) -> None:
    model, saved = shutil.copytree(base, tmp_path / "model"), tmp_path / "saved"
    learner_of(model).save(saved)
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    changed = r"saved.adapter_model\.safetensors was trained on other weights .*: model\.safetensors changed since; put"
    for use, error in (
        (lambda: learner_of(model).load(saved), CheckpointError),
        (lambda: learner_of(model, {"path": saved}), TrainError),
        (lambda: load_model(saved), TrainError),
        (lambda: CausalLM(saved), InferenceError),
        (lambda: export_model(saved, tmp_path / "merged"), TrainError),
    ):
        with pytest.raises(error, match=changed):
            use()
    weights.write_bytes(content)
    learner_of(model).load(saved)


def test_a_flipped_byte_anywhere_changes_the_digest(tmp_path: Path) -> None:
    content = bytearray(17 * 2**20)
    (tmp_path / "model.safetensors").write_bytes(content)
    digests = base_digests(tmp_path)
    content[-17] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    assert base_digests(tmp_path) != digests


def test_every_target_must_match_a_layer(base: Path) -> None:
    with pytest.raises(TrainError, match=r"model\.lora\.targets is \['q_proj', 'nope'\]: .* ends in 'nope'"):
        learner_of(base, {"targets": ["q_proj", "nope"]})


def test_adapters_are_tried_without_the_weights(base: Path, rows: list[TrainRow], tmp_path: Path) -> None:
    info = try_adapters(base, LoRAConfig(rank=4, targets=["q_proj", "up_proj"]))
    assert (info.rank, info.alpha, len(info.targets)) == (4, 8.0, 4)
    trained(learner_of(base, {"alpha": 3.0}), rows, 1).save(tmp_path / "saved")
    info = try_adapters(base, LoRAConfig(path=tmp_path / "saved"))
    assert (info.rank, info.alpha, len(info.targets)) == (4, 3.0, 14)
    for lora, refusal in (
        (LoRAConfig(targets=["lm_head"]), "lm_head is the output matrix"),
        (LoRAConfig(path=tmp_path / "nowhere"), r"model\.lora\.path is .*nowhere"),
        (LoRAConfig(path=tmp_path / "saved", rank=8), r"model\.lora\.rank is 8"),
    ):
        with pytest.raises(TrainError, match=refusal):
            try_adapters(base, lora)


def test_serving_dtype_is_that_of_the_model_under_the_adapter(base: Path, rows: list[TrainRow], tmp_path: Path) -> None:
    half = tmp_path / "half"
    save_model(make_model("qwen3", initializer_range=0.1).bfloat16(), half)
    trained(learner_of(half), rows, 1).save(tmp_path / "saved")
    assert model_under(tmp_path / "saved") == half
    assert CausalLM(tmp_path / "saved").dtype == torch.bfloat16
    assert [serves_float32(directory, "auto") for directory in (base, half, tmp_path / "saved")] == [True, False, False]
    assert serves_float32(half, "float32")
    assert not serves_float32(base, "bfloat16")


def test_adapted_layers_of_trainer_and_server_return_the_same_bfloat16_numbers(base: Path) -> None:
    target = "model.layers.1.mlp.up_proj"
    learner = learner_of(base, compute_dtype="bfloat16")
    weights = {name: tensor.clone() for name, tensor in learner.export_weights()}
    draw = torch.Generator().manual_seed(0)
    for name, tensor in learner.policy.lora.tensors():
        if name.endswith("lora_B.weight"):
            weights[name] = 1e-4 * torch.randn(tensor.shape, generator=draw)
            tensor.copy_(weights[name])
    # Exact in bfloat16, as are the factors of the server where the scale is a power of two.
    server = CausalLM(base, dtype="bfloat16")
    number = server.load_named(weights, replace(learner.adapter, name="main"), 1)
    rows = torch.randn((3000, 64), generator=draw).bfloat16()
    layer = learner.policy.model.get_submodule(target)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trained_output, bare_output = layer(rows), layer.base_layer(rows)
    with torch.inference_mode(), server.adapters.applied(np.full(len(rows), number), server.device):
        assert torch.equal(server._model.get_submodule(target)(rows), trained_output)
    down, up = (weights[f"{target}.{part}.weight"].double() for part in ("lora_A", "lora_B"))
    change = rows.double() @ down.T @ up.T * learner.adapter.scale
    seen = trained_output.double() - bare_output.double()
    assert float((seen * change).sum() / change.square().sum()) == pytest.approx(1.0, abs=0.05)


def test_layers_in_bfloat16_have_the_gradients_of_the_sum(base: Path) -> None:
    layer = learner_of(base, compute_dtype="bfloat16").policy.model.get_submodule("model.layers.0.mlp.down_proj")
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    rows = torch.randn((20, 96), generator=torch.Generator().manual_seed(0)).requires_grad_()
    parameters = [rows, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    with torch.autocast("cpu", torch.bfloat16):
        gradients = torch.autograd.grad(layer(rows).float().square().sum(), parameters)
    exact = torch.autograd.grad(layer(rows).square().sum(), parameters)
    for gradient, expected in zip(gradients, exact, strict=True):
        assert float((gradient - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_frozen_bfloat16_matrices_compute_what_float32_ones_do(
    tmp_path: Path, rows: list[TrainRow], family: str
) -> None:
    base = tmp_path / "base"
    if family == "qwen3":
        save_model(make_model("qwen3", initializer_range=0.1).bfloat16(), base)
    else:
        save_family(family, base, initializer_range=0.1, dtype=torch.bfloat16)
    options = [
        {"compute_dtype": "bfloat16", "optimizations": names, "lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}}
        for names in ([], ["bfloat16_base"])
    ]
    learners = [learner_of(base, **option) for option in options]
    float32, half = (trained(learner, rows) for learner in learners)
    for learner in (float32, half):
        assert all(
            parameter.dtype == torch.float32
            for parameter in learner.policy.model.parameters()
            if parameter.requires_grad
        )
    assert torch.equal(logprobs(float32, rows), logprobs(half, rows))
    for (name, factor), (_, other) in zip(float32.export_weights(), half.export_weights(), strict=True):
        assert torch.equal(factor, other), name
    sizes = [
        sum(p.nbytes for p in learner.policy.model.parameters() if not p.requires_grad) for learner in (float32, half)
    ]
    assert sizes[1] < 0.7 * sizes[0]
    for number, learner in enumerate((float32, half)):
        learner.save_model(tmp_path / str(number))
    saved = [load_file(tmp_path / str(number) / "model.safetensors") for number in range(2)]
    assert saved[0].keys() == saved[1].keys()
    for name, tensor in saved[0].items():
        assert saved[1][name].dtype == tensor.dtype == torch.float32
        assert torch.equal(tensor, saved[1][name]), name
