"""Faster forms of a train step on a GPU: each alone and all together near the plain step, in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.gpu import DEVICE, MARKS, ON_DEVICE, REHEARSED
from support.trainer.gpu_batch import rows, save_small_model
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import Optimization
from turnwise.trainer.model.attention import Scoring, _by_paths, varlen_attention
from turnwise.trainer.model.chunked_logprobs import LogitTransform, score_states
from turnwise.trainer.model.layout import PackedLayout
from turnwise.trainer.model.policy import Policy, load_model

pytestmark = MARKS
ALL: tuple[Optimization, ...] = ("varlen", "compile", "fused_loss", "bfloat16_weights")
"""On a CPU the first is left out: there is no kernel."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


def scored(policy: Policy, *, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
    (batch,) = pack(rows(), 1000, share_prefixes=shared)
    with policy.computing():
        scores = policy.forward(batch, entropy=True)
        assert scores.entropy is not None
        (scores.logprobs.sum() + 0.1 * scores.entropy.sum()).backward()
    gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return scores.logprobs.detach().cpu(), torch.cat(gradients).cpu()


# In a rehearsal layers are compiled once.
@pytest.mark.parametrize("names", [*((name,) for name in (ALL[2:] if REHEARSED else ALL)), ALL])
def test_each_optimization_is_near_the_plain_step(model: Path, names: tuple[Optimization, ...]) -> None:
    for shared in (False, True):
        plain = load_model(model, device=DEVICE, compute_dtype="bfloat16")
        policy = load_model(model, device=DEVICE, compute_dtype="bfloat16", optimizations=names)
        assert policy.optimizations == set(names) - ({"varlen"} if REHEARSED else set())
        (logprobs, gradients), (expected, expected_gradients) = (
            scored(model_policy, shared=shared) for model_policy in (policy, plain)
        )
        assert float((logprobs - expected).abs().max()) < 0.2
        assert float(torch.cosine_similarity(gradients, expected_gradients, dim=0)) > 0.98


@ON_DEVICE
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("size", [64, 128])
def test_varlen_attention_is_near_attention_over_gathered_segments(window: int | None, size: int) -> None:
    lengths = (300, 1, 77, 129, 500)
    segments, start = [], 0
    for length in lengths:
        segments.append((start, length, -1))
        start += length
    layout = PackedLayout.of(segments, torch.device(DEVICE))
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = [
        torch.randn(1, heads, start, size, device=DEVICE, generator=generator).to(torch.bfloat16) for heads in (8, 2, 2)
    ]
    results: list[Any] = []
    for attend in (varlen_attention, _by_paths):
        tensors = [tensor.clone().requires_grad_() for tensor in inputs]
        out = attend(*tensors, layout, Scoring(None, window))
        results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)


@ON_DEVICE
def test_fused_tiles_hold_no_logits_in_float32() -> None:
    """8,192 tokens and 150,000 ids in bfloat16: a tile of 256 MiB in float32 is 128 MiB, and its gradient another."""
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 150_000, bias=False, device=DEVICE)
    states = torch.randn(8192, 64, device=DEVICE, requires_grad=True)
    ids = torch.randint(0, 150_000, (8192,), device=DEVICE)
    results = []
    for fused in (False, True):
        with torch.autocast("cuda", torch.bfloat16):
            logprobs, entropies = score_states(
                head, states, ids, torch.full((8192,), 0.9), LogitTransform(), entropy=True, fused=fused
            )
        assert entropies is not None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (gradient,) = torch.autograd.grad(logprobs.sum() + 0.1 * entropies.sum(), states)
        results.append((logprobs.detach(), gradient, torch.cuda.max_memory_allocated() - before))
    (one, gradient, peak), (other, fused_gradient, fused_peak) = results
    torch.testing.assert_close(other, one, atol=1e-3, rtol=1e-3)
    assert float(torch.cosine_similarity(fused_gradient.flatten(), gradient.flatten(), dim=0)) > 0.999
    assert fused_peak < 0.6 * peak
