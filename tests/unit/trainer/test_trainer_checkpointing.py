"""Activation checkpointing: the same gradients, from less that is held between forward and backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers
from torch import Tensor

from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import MicroBatch, TrainRow
from turnwise.trainer.model.policy import Policy, load_model

Row = Callable[..., TrainRow]


def branching(row: Row) -> list[TrainRow]:
    """Six rows in two groups: all of a group begin alike, and two of them go on alike."""
    rows = []
    for group in range(2):
        prompt = [(5 * n + 7 * group + 3) % 61 for n in range(9)]
        for member in range(3):
            ids = prompt + [(n + min(member, 1)) % 61 for n in range(4)] + [(11 * n + member) % 61 for n in range(5)]
            rows.append(row(len(ids), 9, seed=member, name=f"t{group}-{member}", ids=ids, temperature=0.8))
    return rows


# By the exact type: other tests leave dead weak references behind, and fake tensors, which have no storage.
DENSE = (Tensor, torch.nn.Parameter)


def held(policy: Policy, batch: MicroBatch) -> tuple[int, list[Tensor | None]]:
    """Bytes that a forward pass keeps for the backward pass besides the parameters, and the gradients that it gives."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    activations: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            activations[storage.data_ptr()] = storage.nbytes()
        return tensor

    # What is there already is not listed afterwards: in a run of all tests it is millions of objects.
    gc.freeze()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = policy.forward(batch, entropy=True)
    assert scores.entropy is not None
    # Results of matrix products are kept outside of the graph.
    for tensor in gc.get_objects():
        if type(tensor) in DENSE:
            keep(tensor)
    (scores.logprobs.sum() + 0.3 * scores.entropy.sum()).backward()
    return sum(activations.values()), [parameter.grad for parameter in policy.model.parameters()]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("kind", "share"), [(True, 0.5), ("matmuls", 0.75)])
def test_checkpointing_gives_the_same_gradients_and_holds_less(
    model_dir: Callable[..., Path], row: Row, family: str, shared: bool, kind: Literal[True, "matmuls"], share: float
) -> None:
    """Two layers hold little but their inputs then; what remains is mostly the scores'."""
    (batch,) = pack(branching(row), 1000, share_prefixes=shared)
    assert any(parent >= 0 for _, _, parent in batch.segments) is shared
    (plain, expected), (checkpointed, recomputed) = (
        held(load_model(model_dir(family), gradient_checkpointing=on), batch) for on in (False, kind)
    )
    assert len(recomputed) == len(expected) > 10
    for one, other in zip(recomputed, expected, strict=True):
        assert one is not None
        assert other is not None
        # Recomputed, not approximated.
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert checkpointed < share * plain


@pytest.mark.parametrize("family", ["OPT", "SeedOss"])
def test_checkpointed_scores_are_those_of_evaluation_mode(row: Row, tmp_path: Path, family: str) -> None:
    """Both families drop values by functions in their layers, and by default."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61}
    if family == "SeedOss":
        sizes |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "residual_dropout": 0.1}
        sizes["attention_dropout"] = 0.1
    else:
        sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.1}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (batch,) = pack(branching(row), 1000, share_prefixes=False)
    plain = load_model(tmp_path).forward(batch).logprobs
    policy = load_model(tmp_path, gradient_checkpointing=True)
    scores = policy.forward(batch).logprobs
    torch.testing.assert_close(scores, plain, atol=1e-6, rtol=1e-6)
    scores.sum().backward()
    torch.testing.assert_close(policy.forward(batch).logprobs, plain, atol=1e-6, rtol=1e-6)
