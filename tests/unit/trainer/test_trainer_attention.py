"""Attention over forests of segments against a dense mask, for each way of computing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from support.property_tests import examples
from turnwise.trainer.model import attention as flex_module
from turnwise.trainer.model.attention import (
    Scoring,
    _by_paths,
    block_mask,
    flex_tree_attention,
    packed_attention,
    shared_attention,
)
from turnwise.trainer.model.layout import PackedLayout

CPU = torch.device("cpu")
Segments = list[tuple[int, int, int]]


@st.composite
def forests(draw: st.DrawFn, limit: int = 9, longest: int = 7) -> Segments:
    """Segments in the order of a walk: each hangs on the one before it, one of that one's ancestors, or on nothing."""
    segments: Segments = []
    path: list[int] = []
    start = 0
    for number in range(draw(st.integers(1, limit))):
        path = path[: draw(st.integers(0, len(path)))]
        length = draw(st.integers(1, longest))
        segments.append((start, length, path[-1] if path else -1))
        path.append(number)
        start += length
    return segments


def visible(segments: Segments, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Who sees whom, [T, T], and positions, walked token by token from the definition."""
    total = sum(length for _, length, _ in segments)
    mask, positions = torch.zeros(total, total, dtype=torch.bool), torch.zeros(total, dtype=torch.int64)
    paths: list[list[int]] = []
    for start, length, parent in segments:
        path = list(paths[parent]) if parent != -1 else []
        for token in range(start, start + length):
            path.append(token)
            positions[token] = len(path) - 1
            mask[token, path if window is None else path[-window:]] = True
        paths.append(path)
    return mask, positions


def inputs(tokens: int, heads: int = 4, shared_heads: int = 2, size: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(heads, size), (shared_heads, size), (shared_heads, size)]
    tensors = [2 * torch.randn(1, tokens, h, d, generator=generator) for h, d in shapes]
    return [tensor.transpose(1, 2).requires_grad_() for tensor in tensors]


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[None, :, None, None]
    return (weights / total @ v.repeat_interleave(groups, 1)).transpose(1, 2)


def agree(
    kernel: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], tensors: list[torch.Tensor]
) -> None:
    weight = torch.randn(tensors[0].transpose(1, 2).shape, generator=torch.Generator().manual_seed(1))
    outcomes = []
    for attend in (kernel, reference):
        out = attend(*tensors)
        outcomes.append((out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)))
    for name, got, want in zip(("out", "query", "key", "value"), *outcomes, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@settings(max_examples=examples(25), deadline=None)
@given(segments=forests())
def test_shared_and_path_kernels_equal_a_dense_mask(segments: Segments) -> None:
    layout = PackedLayout.of(segments, CPU)
    mask, positions = visible(segments)
    assert layout.positions.tolist() == positions.tolist()
    assert layout.longest_path == int(positions.max()) + 1
    tensors = inputs(layout.tokens)
    for kernel in (
        lambda q, k, v: shared_attention(q, k, v, layout, 0.3),
        lambda q, k, v: _by_paths(q, k, v, layout, Scoring(0.3)),
    ):
        agree(kernel, lambda q, k, v: dense(q, k, v, mask, 0.3), tensors)


@settings(max_examples=examples(15), deadline=None)
@given(segments=forests(), window=st.integers(1, 9), cap=st.sampled_from([None, 2.0]), sinks=st.booleans())
def test_windows_caps_and_sinks_follow_the_path(
    segments: Segments, window: int, cap: float | None, sinks: bool
) -> None:
    layout = PackedLayout.of(segments, CPU)
    mask, _ = visible(segments, window)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None
    tensors = inputs(layout.tokens)
    agree(
        lambda q, k, v: _by_paths(q, k, v, layout, Scoring(0.3, window, cap, sink)),
        lambda q, k, v: dense(q, k, v, mask, 0.3, cap, sink),
        tensors,
    )


@pytest.mark.parametrize(("window", "cap", "sinks"), [(None, None, False), (3, 2.0, True), (None, None, True)])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_follows_the_path(window: int | None, cap: float | None, sinks: bool) -> None:
    """Uncompiled, and forward only: it has no backward pass on a CPU; tests/gpu has both."""
    layout = PackedLayout.of([(0, 7, -1), (7, 2, 0), (9, 1, 1), (10, 4, 1), (14, 3, 0), (17, 5, -1)], CPU)
    mask, _ = visible(list(layout.segments), window)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None
    tensors = [tensor.detach() for tensor in inputs(layout.tokens)]
    got = flex_tree_attention(*tensors, layout, Scoring(0.3, window, cap, sink))
    torch.testing.assert_close(got, dense(*tensors, mask, 0.3, cap, sink), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "scoring", [{"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sliding_window": 3}, {"softcap": 2.0}, {}]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_rows_without_shared_prefixes_take_flex_attention_where_scores_would_be_stored(
    scoring: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that compiles it; tests/gpu measures the memory."""
    calls: list[torch.Size] = []

    def attend(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(query.shape)
        return flex_attention(query, *rest, **options)

    for name, substitute in (
        ("compiles_attention", lambda _: True),
        ("on_cpu", lambda _: False),
        ("_compiled", lambda: attend),
    ):
        monkeypatch.setattr(flex_module, name, substitute)
    layout = PackedLayout.of([(0, 7, -1), (7, 5, -1)], CPU)
    mask, _ = visible(list(layout.segments), scoring.get("sliding_window"))
    tensors = [tensor.detach() for tensor in inputs(layout.tokens)]
    got, _ = packed_attention(torch.nn.Identity(), *tensors, None, turnwise_layout=layout, **scoring)
    expected = dense(*tensors, mask, 8**-0.5, scoring.get("softcap"), scoring.get("s_aux"))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    assert len(calls) == (1 if scoring else 0)


def test_block_masks_leave_out_blocks_beyond_the_window() -> None:
    """1,024 tokens in blocks of 128: each query block sees itself and, within 128 tokens, the one before it."""
    sparse_mask = block_mask(PackedLayout.of([(0, 1024, -1)], CPU), 128)
    assert sparse_mask.full_kv_num_blocks is not None
    counts = sparse_mask.kv_num_blocks + sparse_mask.full_kv_num_blocks
    assert counts[0, 0].tolist() == [1, 2, 2, 2, 2, 2, 2, 2]


@settings(max_examples=examples(15), deadline=None)
@given(segments=forests(), window=st.sampled_from([None, 3]))
def test_block_masks_include_every_visible_block(segments: Segments, window: int | None) -> None:
    """Blocks of 4 instead of 128: seen blocks are all there, and those without a mask are seen as a whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_module, "_BLOCK", 4)
        layout = PackedLayout.of(segments, CPU)
        sparse_mask = block_mask(layout, window)
    mask, _ = visible(segments, window)
    count = -(-layout.tokens // 4)
    padded = torch.zeros(count * 4, count * 4, dtype=torch.bool)
    padded[: layout.tokens, : layout.tokens] = mask
    blocks = padded.view(count, 4, count, 4).transpose(1, 2)

    def named(counts: torch.Tensor | None, indices: torch.Tensor | None) -> set[tuple[int, int]]:
        assert counts is not None
        assert indices is not None
        return {(q, int(kv)) for q in range(count) for kv in indices[0, 0, q, : int(counts[0, 0, q])]}

    partial = named(sparse_mask.kv_num_blocks, sparse_mask.kv_indices)
    full = named(sparse_mask.full_kv_num_blocks, sparse_mask.full_kv_indices)
    assert not partial & full
    for q in range(count):
        for kv in range(count):
            if blocks[q, kv].any():
                assert (q, kv) in partial | full
            if (q, kv) in full:
                rows = slice(0, min(4, layout.tokens - 4 * q))
                assert blocks[q, kv][rows].all()


def test_long_segments_are_batched_by_length() -> None:
    """Two prompts of 70 and 65 tokens with three completions each, whose lengths differ little."""
    segments: Segments = [(0, 70, -1), (70, 40, 0), (110, 38, 0), (148, 33, 0)]
    segments += [(181, 65, -1), (246, 40, 4), (286, 37, 4), (323, 9, 4)]
    layout = PackedLayout.of(segments, CPU)
    assert [bucket.shape for bucket in layout.own_buckets] == [(2, 70), (5, 40), (1, 9)]
    assert layout.shared == ((0, 70, 181), (181, 246, 332))
    mask, _ = visible(segments)
    agree(
        lambda q, k, v: shared_attention(q, k, v, layout, None),
        lambda q, k, v: dense(q, k, v, mask, 8**-0.5),
        inputs(layout.tokens),
    )


def test_the_longest_segments_are_read_without_a_copy() -> None:
    """From 96 tokens on none is padded to the length of another."""
    segments: Segments = [(0, 120, -1), (120, 100, 0), (220, 96, 0), (316, 95, 0), (411, 90, 0), (501, 97, -1)]
    layout = PackedLayout.of(segments, CPU)
    assert [(bucket.shape, bucket.start) for bucket in layout.own_buckets] == [
        ((1, 120), 0), ((1, 100), 120), ((1, 97), 501), ((1, 96), 220), ((2, 95), -1),
    ]  # fmt: skip
    mask, _ = visible(segments)
    agree(
        lambda q, k, v: shared_attention(q, k, v, layout, None),
        lambda q, k, v: dense(q, k, v, mask, 8**-0.5),
        inputs(layout.tokens),
    )


def test_padding_of_extreme_scores_has_no_gradient() -> None:
    """A padded query repeats the first one, whose score with a later key may be hundreds above its own denominator."""
    segments: Segments = [(0, 4, -1), (4, 3, -1)]
    layout = PackedLayout.of(segments, CPU)
    tensors = inputs(7)
    with torch.no_grad():
        tensors[1][0, :, 5:] = 100 * tensors[0][0, ::2, 4:5]
    out = shared_attention(*tensors, layout, 1.0)
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert torch.isfinite(gradient).all()


def test_bfloat16_parts_are_added_in_float32() -> None:
    segments: Segments = [(0, 30, -1), (30, 10, 0), (40, 10, 1), (50, 10, 1)]
    layout = PackedLayout.of(segments, CPU)
    exact = inputs(60)
    mask, _ = visible(segments)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = packed_attention(torch.nn.Identity(), *exact, None, turnwise_layout=layout)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), dense(*exact, mask, 8**-0.5), atol=0.06, rtol=0.05)
