"""AdamW's states in 8 bits: near those of float32, of the size that the plan counts, and saved exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.tiny_lm import make_model
from turnwise.errors import CheckpointError
from turnwise.trainer.config.policy import OptimConfig
from turnwise.trainer.learn import adamw
from turnwise.trainer.learn.adamw import BLOCK, compress, expand
from turnwise.trainer.learn.optim import OptimizerSet
from turnwise.trainer.scale.memory import optimizer_bytes
from turnwise.trainer.scale.shape import ModelShape


def model() -> Any:
    torch.manual_seed(0)
    tiny = make_model("qwen3", hidden_size=128, intermediate_size=192, initializer_range=0.1)
    return tiny.requires_grad_(True)


def config(name: str) -> OptimConfig:
    return OptimConfig.model_validate({"lr": 1e-2, "name": name, "weight_decay": 0.1})


def advance(trained: Any, optimizer: OptimizerSet, steps: range) -> None:
    """Learn to predict the next of ids that follow one another, by other sequences in each step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(0, 40, (8, 1), generator=generator)
        ids = starts + torch.arange(12) * torch.randint(1, 3, (8, 1), generator=generator)
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step(1.0)


def flat(trained: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_keep_the_largest_of_a_block_and_a_share_of_all_others(dtype: torch.dtype) -> None:
    values = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    values[BLOCK : 2 * BLOCK] *= 1e-12
    values[2 * BLOCK :] = 0.0
    values = values.square() if dtype == torch.uint8 else values
    codes, scales = torch.empty_like(values, dtype=dtype), torch.empty(3)
    compress(values, codes, scales)
    restored = expand(codes, scales)
    torch.testing.assert_close(scales, values.abs().view(3, -1).amax(1), atol=0, rtol=0)
    largest = values.abs().view(3, -1).argmax(1) + BLOCK * torch.arange(3)
    torch.testing.assert_close(restored[largest], values[largest], atol=0, rtol=1e-6)
    # Half a step of the root, 2 / 127 or 4 / 255 of the number, grows as the root falls.
    shares = (values.abs().view(3, -1) / scales.clamp(min=1e-38)[:, None]).flatten()
    steps = (1 / 127 * shares.sqrt() if dtype == torch.int8 else 2 / 255 * shares**0.75) + 1e-4
    assert ((restored - values).abs() <= 1.05 * steps * scales.repeat_interleave(BLOCK)).all()
    assert (restored[2 * BLOCK :] == 0).all()


def test_steps_in_eight_bits_are_within_three_percent_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    # Matrices are updated in several pieces.
    monkeypatch.setattr(adamw, "_PIECE", 16 * BLOCK)
    initial, trained = flat(model()), {}
    for name in ("adamw", "adamw_int8"):
        learned = model()
        advance(learned, OptimizerSet(learned, config(name)), range(30))
        trained[name] = flat(learned)
    distance = (trained["adamw_int8"] - trained["adamw"]).norm() / (trained["adamw"] - initial).norm()
    assert 1e-3 < distance < 0.03


def test_states_in_eight_bits_have_the_bytes_of_the_plan(tmp_path: Path) -> None:
    # Rows that blocks divide, in all matrices.
    sizes = {"head_dim": 32, "tie_word_embeddings": True, "hidden_size": 128, "intermediate_size": 192}
    learned: Any = make_model("qwen3", **sizes).requires_grad_(True)
    learned.save_pretrained(tmp_path)
    optimizer = OptimizerSet(learned, config("adamw_int8"))
    advance(learned, optimizer, range(1))
    stored = sum(tensor.nbytes for _, _, state in optimizer.states() for tensor in state.values() if tensor.ndim)
    # Norms stay float32, and are more of a small model than of a large one.
    assert stored == pytest.approx(optimizer_bytes(ModelShape.load(tmp_path, "model"), config("adamw_int8")), rel=0.02)


def test_states_in_eight_bits_restore_bit_for_bit(tmp_path: Path) -> None:
    learned = model()
    optimizer = OptimizerSet(learned, config("adamw_int8"))
    advance(learned, optimizer, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    weights = copy.deepcopy(learned.state_dict())
    advance(learned, optimizer, range(3, 6))
    other = model()
    other.load_state_dict(weights)
    restored = OptimizerSet(other, config("adamw_int8"))
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    advance(other, restored, range(3, 6))
    assert torch.equal(flat(other), flat(learned))


def test_states_of_another_type_are_refused_by_key() -> None:
    saved = OptimizerSet(model(), config("adamw_int8")).state_dict()
    with pytest.raises(CheckpointError, match=r"moments are int8: resume with optim\.name: adamw_int8"):
        OptimizerSet(model(), config("adamw")).load_state_dict(saved)
