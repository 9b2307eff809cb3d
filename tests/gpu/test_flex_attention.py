"""Trees on a GPU: FlexAttention, compiled, against attention written out over each path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.engine.gpu import MARKS, ON_DEVICE
from turnwise.trainer.model.attention import Scoring, _by_paths, flex_tree_attention, packed_attention
from turnwise.trainer.model.layout import PackedLayout

pytestmark = [*MARKS, ON_DEVICE]


@pytest.mark.parametrize(("window", "cap"), [(None, None), (50, None), (None, 20.0)])
def test_outputs_and_gradients_equal_attention_over_each_path(window: int | None, cap: float | None) -> None:
    """A prompt of 300 tokens with completions, one of which forks again, and a row of its own: blocks of all kinds."""
    lengths = [(300, -1), (90, 0), (140, 0), (1, 2), (77, 2), (200, 0), (129, -1)]
    segments, start = [], 0
    for length, parent in lengths:
        segments.append((start, length, parent))
        start += length
    layout = PackedLayout.of(segments, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(1, heads, start, 64, device="cuda", generator=generator) for heads in (8, 2, 2)]
    weight = torch.randn(1, start, 8, 64, device="cuda", generator=generator)
    results = []
    for attend in (flex_tree_attention, _by_paths):
        tensors = [tensor.clone().requires_grad_() for tensor in inputs]
        out = attend(*tensors, layout, Scoring(None, window, cap))
        results.append((out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)))
    for name, got, want in zip(("out", "query", "key", "value"), *results, strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scoring", [{"s_aux": True}, {"sliding_window": 128}, {"softcap": 20.0}, {}])
def test_no_scores_or_masks_of_long_rows_are_stored(scoring: dict[str, Any], dtype: torch.dtype) -> None:
    """A row of 8,192 tokens without shared prefixes: one T x T of a byte would take 64 MiB, and of scores 2 GiB."""
    layout = PackedLayout.of([(0, 8192, -1), (8192, 300, -1)], torch.device("cuda"))
    options = scoring | ({"s_aux": torch.zeros(8, device="cuda")} if "s_aux" in scoring else {})
    tensors = [
        torch.randn(1, heads, layout.tokens, 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (8, 2, 2)
    ]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = packed_attention(torch.nn.Identity(), *tensors, None, turnwise_layout=layout, **options)
    torch.autograd.grad(out.float().sum(), tensors)
    assert torch.cuda.max_memory_allocated() - before < 8 * sum(x.nbytes for x in (*tensors, out))
