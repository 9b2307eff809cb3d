"""A model that is filled from its folder shard by shard equals the one that transformers loads whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Chunk, WeightConverter

from support.engine.families import FAMILIES, save_family
from support.engine.tiny_lm import make_model, save_model
from support.trainer.ranks import pair_of_ranks
from turnwise.engine.lora import adapter_chain
from turnwise.errors import FormatError, TrainError
from turnwise.trainer.config.policy import LoRAConfig, PolicyConfig
from turnwise.trainer.learn.fsdp_learner import FSDPLearner
from turnwise.trainer.model.policy import Policy, empty_model, load_model, wrap_model
from turnwise.trainer.model.shards import merge_into_shards, read_shards

CPU = torch.device("cpu")


def filled_policy(path: Path, lora: LoRAConfig | None = None) -> Policy:
    """Load a policy as a rank does, which here has all of it."""
    policy = wrap_model(empty_model(path), path, "float32", lora)
    assert all(parameter.is_meta for parameter in policy.model.parameters())
    base, adapters = adapter_chain(path)
    if policy.lora is None:
        finish = read_shards(policy.model, base, CPU)
        merge_into_shards(policy.model, adapters)
        finish()
    else:
        policy.lora.draw()
        with policy.lora.removed():
            read_shards(policy.model, base, CPU)()
    policy.check()
    return policy


def assert_equal_models(filled: Policy, loaded: Policy) -> None:
    pairs = zip(filled.named_weights(), loaded.named_weights(), strict=True)
    for (name, tensor), (other_name, other) in pairs:
        assert name == other_name
        assert torch.equal(tensor, other)
        assert tensor.dtype == other.dtype
    buffers = dict(loaded.model.named_buffers())
    assert all(torch.equal(tensor, buffers.pop(name)) for name, tensor in filled.model.named_buffers())
    assert not buffers
    ties = [
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
        for model in (filled.model, loaded.model)
    ]
    assert ties[0] == ties[1]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_filled_model_equals_the_loaded_one(model_type: str, tmp_path: Path) -> None:
    folder = save_family(model_type, tmp_path)
    assert_equal_models(filled_policy(folder), load_model(folder))


def test_files_with_an_index_a_tied_matrix_by_its_other_name_and_bfloat16_are_read(tmp_path: Path) -> None:
    folder = save_family("qwen3", tmp_path, tie_word_embeddings=True)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loaded = load_model(folder)
    loaded.model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for path in (folder, tmp_path / "parts"):
        assert_equal_models(filled_policy(path), loaded)


def test_adapters_are_merged_and_drawn_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = save_family("qwen3", tmp_path / "base")
    policy = load_model(base, lora=LoRAConfig(rank=4))
    with torch.no_grad():
        for _, factor in policy.lora.tensors():
            factor.normal_()
    policy.save_trained(tmp_path / "adapter")
    assert_equal_models(filled_policy(tmp_path / "adapter"), load_model(tmp_path / "adapter"))
    for config in (LoRAConfig(rank=4), LoRAConfig(path=tmp_path / "adapter")):
        filled, loaded = filled_policy(base, config), load_model(base, lora=config)
        assert_equal_models(filled, loaded)
        pairs = zip(filled.lora.tensors(), loaded.lora.tensors(), strict=True)
        assert all(name == other_name and torch.equal(factor, other) for (name, factor), (other_name, other) in pairs)
        assert filled.lora.continued == loaded.lora.continued


def test_folders_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_family("qwen3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def read_with(changed: dict[str, torch.Tensor]) -> None:
        other = shutil.copytree(folder, tmp_path / "other", dirs_exist_ok=True)
        save_file(changed, other / "model.safetensors", {"format": "pt"})
        read_shards(empty_model(other), other, CPU)

    with pytest.raises(FormatError, match=f"other has no tensor for {name}"):
        read_with({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(FormatError, match=rf"{name} has another shape in .*other than \(64, 32\)"):
        read_with({**tensors, name: torch.ones(3, 32)})
    fused = [WeightConverter("fused.weight", ["gate_proj.weight", "up_proj.weight"], [Chunk(dim=0)])]
    monkeypatch.setattr("turnwise.trainer.model.shards.get_model_conversion_mapping", lambda _: fused)
    parts = {name.replace("up_proj", "fused"): torch.ones(128, 32)}
    with pytest.raises(FormatError, match=r"converts by Chunk and ranks cannot read in parts: choose the engine torch"):
        read_with({key: value for key, value in tensors.items() if "layers.1.mlp" not in key} | parts)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FormatError, match=r"holds no model\.safetensors and no model\.safetensors\.index\.json: save"):
        read_shards(empty_model(folder), folder, CPU)
    (folder / "config.json").write_text("{}")
    with pytest.raises(TrainError, match="settings make no causal language model"):
        empty_model(folder)


def memory(pid: int, field: str) -> int:
    """Return a figure of a process's memory in bytes: VmRSS now, VmHWM the most since it was reset."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


@pytest.mark.long
def test_no_rank_holds_more_than_its_share_and_pages_of_the_file_while_it_loads(tmp_path: Path) -> None:
    large = make_model("qwen3", hidden_size=512, intermediate_size=2048, num_hidden_layers=50).bfloat16()
    path = save_model(large, tmp_path)
    size = sum(4 * parameter.numel() for parameter in large.parameters())
    assert size > 600e6
    config = PolicyConfig.model_validate({"model": {"path": path, "device": "cpu"}})
    with pair_of_ranks(4) as ranks:
        for pid in ranks.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        before = [memory(pid, "VmRSS") for pid in ranks.pids]
        learner = FSDPLearner(ranks, config, 9)
        extra = [memory(pid, "VmHWM") - first for pid, first in zip(ranks.pids, before, strict=True)]
        loaded = dict(learner.export_weights())["model.norm.weight"]
    # A quarter in float32, pages of the file in bfloat16, and what is gathered while the model is checked.
    assert max(extra) < size / 4 + size / 2 + 60e6, extra
    assert torch.equal(loaded, large.model.norm.weight.float())
