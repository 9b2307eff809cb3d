"""Weights by the names of the checkpoint: what saving writes, for mixtures and others, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.engine.families import FAMILIES, save_family
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.checkpoint_names import CheckpointNames
from turnwise.errors import FormatError
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.model.weights import PolicyWeights


@pytest.mark.parametrize("model_type", FAMILIES)
def test_split_weights_are_those_of_the_saved_folder_and_join_to_the_model(model_type: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_family(model_type, tmp_path))
    file, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    names = CheckpointNames(model, state)
    tensors = {name: part for parameter in state for name, part in names.split(parameter, state[parameter]).items()}
    assert FAMILIES[model_type][1] in file
    # A tied output matrix is not in the file.
    assert tensors.keys() - file.keys() <= {"lm_head.weight"}
    assert all(torch.equal(tensors[name], file[name]) for name in file)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == names.types
    assert all(torch.equal(names.join(parameter, tensors), state[parameter]) for parameter in state)
    # A model without memory has the same names.
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    assert CheckpointNames(empty, empty.state_dict()).types == names.types


def test_parameters_are_rounded_for_servers_and_saved_buffers_are_not(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_family("deepseek_v3", tmp_path))
    weights = PolicyWeights(model, None)
    rounded = dict(weights.read(torch.bfloat16))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {name for name, tensor in rounded.items() if tensor.dtype == torch.float32} == {bias}
    assert all(torch.equal(rounded[name], tensor.to(rounded[name].dtype)) for name, tensor in weights.read())
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in rounded.items()} == weights.types(
        torch.bfloat16
    )


def test_a_mixture_is_updated_by_the_names_of_its_checkpoint_and_refuses_others(tmp_path: Path) -> None:
    folder = save_family("qwen3_moe", tmp_path / "model")
    policy = load_model(folder)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01)
    sent = {name: tensor.clone() for name, tensor in policy.named_weights()}
    served = CausalLM(folder)
    served.load(sent, 1)
    policy.save_hf(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == sent.keys()
    saved = dict(CausalLM(tmp_path / "saved")._model.state_dict())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in served._model.state_dict().items())
    expert = "model.layers.0.mlp.experts.2.up_proj.weight"
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 32, 32)}
    for tensors, problem in (
        ({name: tensor for name, tensor in sent.items() if name != expert}, f"missing '{expert}'"),
        ({**sent, expert: torch.zeros(16, 16)}, f"{expert} has shape"),
        ({**sent, **fused}, "unknown name 'model.layers.0.mlp.experts.gate_up_proj'"),
    ):
        with pytest.raises(FormatError, match=problem):
            served.load(tensors, 2)
