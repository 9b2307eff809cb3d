"""Checks of a model before training: packed sequences are computed as each alone, exact ones to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.engine.capacity import unseen_window
from turnwise.engine.numerics.self_check import CHUNKS, Part, first_variant
from turnwise.engine.vision import VisionTower, attention_by_part
from turnwise.errors import TrainError
from turnwise.trainer.model.attention import ATTENTION, LAYOUT_ARGUMENT
from turnwise.trainer.model.layout import PackedLayout, Segments

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_packable(model: Any, transform: Callable[[Tensor], Tensor]) -> None:
    """Switch a model to packed attention and check that packed sequences give the logits of each alone.

    Packed are two sequences with a shared prefix and a separate one; the reference is the model's own attention, one
    sequence at a time. Layers with recurrent state (state-space, linear attention) fail here.
    ``transform`` is what the trainer computes of logits (``LogitTransform``).

    Raises:
        TrainError: The model cannot be switched, or the logits differ.
    """
    name = type(model).__name__
    kinds = set(model.config.get_text_config().to_dict().get("layer_types") or ()) - _LAYER_TYPES
    if kinds:
        raise TrainError(f"{name} has layers of type {', '.join(sorted(kinds))}: they cannot be trained packed")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise TrainError(f"{name} has no linear output layer, whose logits could be computed in parts")
    try:
        _compare_packed(model, transform)
    except TrainError:
        raise
    except Exception as error:  # of a model, called as it may not be meant to be
        raise TrainError(f"{name} cannot compute packed tokens: {type(error).__name__}: {error}") from error


def _compare_packed(model: Any, transform: Callable[[Tensor], Tensor]) -> None:
    name, settings = type(model).__name__, model.config.get_text_config().to_dict()
    device = next(iter(model.parameters())).device
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    ids = (torch.arange(11, device=device) * 7919 + 1).remainder(vocabulary)
    begin, first, second, other = torch.split(ids, [3, 2, 3, 3])
    with torch.no_grad():
        plain = [
            model(input_ids=part[None], use_cache=False).logits[0]
            for part in (torch.cat([begin, first]), torch.cat([begin, second]), other)
        ]
        seeing = VisionTower.of(model) is not None
        model.set_attn_implementation(attention_by_part(ATTENTION) if seeing else ATTENTION)
        if model.config.get_text_config()._attn_implementation != ATTENTION:
            raise TrainError(f"{name} does not take its attention from transformers.AttentionInterface")
        layout = PackedLayout.of(((0, 3, -1), (3, 2, 0), (5, 3, 0), (8, 3, -1)), device)
        output = model.get_decoder()(
            input_ids=ids[None], position_ids=layout.positions[None], use_cache=False, **{LAYOUT_ARGUMENT: layout}
        )
        packed = transform(model.get_output_embeddings()(output.last_hidden_state[0]))
    reference = torch.cat([plain[0], plain[1][3:], plain[2]])
    difference = float((packed - reference).abs().max())
    scale = float(reference.abs().max())
    # Ranks may gather weights in bfloat16.
    tolerance = 1e-3 if reference.dtype == torch.float32 else 6e-2
    if not difference <= tolerance * max(1.0, scale):
        raise TrainError(
            f"{name}: packed logits differ from the model's own by {difference:.3g} (largest logit {scale:.3g}), so "
            "attention leaks between segments, or the model transforms its logits in an unsupported way"
        )
    if (window := unseen_window(settings, layout.windows)) is not None:
        raise TrainError(
            f"{name} bounds its attention to {window} tokens (sliding_window in config.json) by a mask alone, which "
            "packed training cannot follow: longer rows would be wrong"
        )


def check_exact(model: Any) -> None:
    """Check that a token's logits depend neither on the segments of its path, nor on what is beside it.

    Raises:
        TrainError: They do; names the operation.
    """
    count, head = sum(CHUNKS), model.get_output_embeddings()
    ids = (torch.arange(count) * 7919 + 1).remainder(head.out_features)
    starts = [0, *itertools.accumulate(CHUNKS)]
    chain = tuple((start, size, number - 1) for number, (start, size) in enumerate(zip(starts, CHUNKS, strict=False)))

    def run(segments: Segments, tokens: Tensor) -> Tensor:
        layout = replace(PackedLayout.of(segments, ids.device), exact=True)
        output = model.get_decoder()(
            input_ids=tokens[None], position_ids=layout.positions[None], use_cache=False, **{LAYOUT_ARGUMENT: layout}
        )
        logits: Tensor = head(output.last_hidden_state[0])
        return logits

    parts = [Part(partial(run, ((0, stop, -1),), ids[:stop]), slice(None), slice(stop)) for stop in starts[1:-1]]
    beside = (*chain, (count, count, -1))
    parts.append(Part(partial(run, beside, torch.cat([ids, ids.flip(0)])), slice(count), slice(None)))
    with torch.no_grad():
        variant = first_variant(model, partial(run, ((0, count, -1),), ids), parts)
    if variant is not None:
        raise TrainError(
            f"{type(model).__name__} cannot be trained with exact numerics: {variant} computes for a token what "
            "depends on the tokens beside it"
        )
