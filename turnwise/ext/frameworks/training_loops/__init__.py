"""What third-party training loops need: padded batches of rows, and ids of tool responses.

Tool responses work for every chat format, because the template itself renders them, with the proofs of
:mod:`~turnwise.chat.incremental_render`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.errors import RenderError, TrainError
from turnwise.model.canonical import Canonical, CanonicalCall
from turnwise.model.core import Renderer
from turnwise.trajectory import TrainSample
from turnwise.types import TokenIds, ToolCall, ToolSchema


@dataclass(frozen=True)
class PaddedBatch:
    """B rows padded to the longest, with their metadata.

    Attributes:
        input_ids: int64 of shape [B, T]; ``pad_id`` on padding.
        attention_mask: int64 of shape [B, T], 1 on tokens, 0 on padding.
        position_ids: int64 of shape [B, T], from 0 at a row's first token; 0 on padding.
        loss_mask: bool of shape [B, T], true on trained tokens.
        labels: int64 of shape [B, T]: the token where it is trained, else -100 (as transformers' losses read it).
        rollout_logprobs: float32 of shape [B, T], reported by the server; 0 on tokens that were not sampled.
        weight_versions: int64 of shape [B, T], the weights that sampled the token; -1 where it was not sampled.
        turn_ids: int64 of shape [B, T]; -1 on tokens that were not sampled.
        advantages: float32 of shape [B, T], 0 on untrained tokens; None where none were given.
        prompt_ids: int64 of shape [B, P]: the tokens before the first trained one, padded on the left.
        prompt_mask: int64 of shape [B, P].
        completion_ids: int64 of shape [B, C]: from the first trained token on, tool responses included, padded on the
            right.
        completion_mask: int64 of shape [B, C], 1 on tokens, 0 on padding.
        completion_loss_mask: bool of shape [B, C]: ``loss_mask`` of the completions.
        completion_logprobs: float32 of shape [B, C]: ``rollout_logprobs`` of the completions.
        trajectory_ids: The trajectory of each row.
        group_ids: The group of each row.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    labels: Tensor
    rollout_logprobs: Tensor
    weight_versions: Tensor
    turn_ids: Tensor
    advantages: Tensor | None
    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    completion_loss_mask: Tensor
    completion_logprobs: Tensor
    trajectory_ids: tuple[str, ...]
    group_ids: tuple[str, ...]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def collate_padded(
    samples: Sequence[TrainSample],
    side: Literal["left", "right"] = "right",
    *,
    pad_id: int = 0,
    advantages: Sequence[float | Sequence[float]] | None = None,
    pad_to_multiple_of: int = 1,
) -> PaddedBatch:
    """Pad rows to one length.

    Whole rows are padded on ``side``; prompts on the left and completions on the right, so that concatenating the two
    aligns the completions.

    Args:
        samples: The output of ``to_samples``.
        side: Side on which whole rows are padded.
        pad_id: Id of padding.
        advantages: Per sample a scalar for all trained tokens, or one number per token.
        pad_to_multiple_of: The lengths T, P and C are rounded up to a multiple of this.

    Raises:
        TrainError: No sample, an invalid argument, or a sample with media.
    """
    _check(samples, side, pad_to_multiple_of)
    token_advantages = None if advantages is None else _advantages(samples, advantages)
    firsts = [
        int(np.argmax(sample.loss_mask)) if sample.trained_tokens else len(sample.loss_mask) for sample in samples
    ]
    starts, ends = [0] * len(samples), [len(sample.input_ids) for sample in samples]
    full, prompt, completion = (starts, ends, side), (starts, firsts, "left"), (firsts, ends, "right")

    def laid(rows: Sequence[Any], where: tuple[list[int], list[int], str], fill: float, dtype: torch.dtype) -> Tensor:
        parts = [row[start:stop] for row, start, stop in zip(rows, where[0], where[1], strict=True)]
        return _padded(parts, where[2], fill, dtype, pad_to_multiple_of)

    ids = [sample.input_ids for sample in samples]
    ones = [np.ones(len(row_ids), np.int64) for row_ids in ids]
    masks = [sample.loss_mask for sample in samples]
    logprobs = [sample.rollout_logprobs for sample in samples]
    integers, numbers = torch.int64, torch.float32
    return PaddedBatch(
        input_ids=laid(ids, full, pad_id, integers),
        attention_mask=laid(ones, full, 0, integers),
        position_ids=laid([np.arange(len(row_ids)) for row_ids in ids], full, 0, integers),
        loss_mask=laid(masks, full, False, torch.bool),
        labels=laid([np.where(m, i, -100) for i, m in zip(ids, masks, strict=True)], full, -100, integers),
        rollout_logprobs=laid(logprobs, full, 0.0, numbers),
        weight_versions=laid([sample.weight_versions for sample in samples], full, -1, integers),
        turn_ids=laid([sample.turn_ids for sample in samples], full, -1, integers),
        advantages=None if token_advantages is None else laid(token_advantages, full, 0.0, numbers),
        prompt_ids=laid(ids, prompt, pad_id, integers),
        prompt_mask=laid(ones, prompt, 0, integers),
        completion_ids=laid(ids, completion, pad_id, integers),
        completion_mask=laid(ones, completion, 0, integers),
        completion_loss_mask=laid(masks, completion, False, torch.bool),
        completion_logprobs=laid(logprobs, completion, 0.0, numbers),
        trajectory_ids=tuple(sample.trajectory_id for sample in samples),
        group_ids=tuple(sample.group_id for sample in samples),
    )


def _check(samples: Sequence[TrainSample], side: str, multiple: int) -> None:
    if not samples:
        raise TrainError("samples is empty: there is nothing to pad")
    if side not in ("left", "right"):
        raise TrainError(f"side is {side!r}; it must be left or right")
    if multiple < 1:
        raise TrainError(f"pad_to_multiple_of is {multiple}; it must be at least 1")
    for sample in samples:
        if sample.media:
            raise TrainError(f"a row of trajectory {sample.trajectory_id} holds media, which tensors of ids cannot")


def _padded(parts: Sequence[npt.NDArray[Any]], side: str, fill: float, dtype: torch.dtype, multiple: int) -> Tensor:
    """Stack parts of rows, padded on a side to the longest and rounded up to a multiple."""
    width = -(-max(len(part) for part in parts) // multiple) * multiple
    out = torch.full((len(parts), width), fill, dtype=dtype)
    for number, part in enumerate(parts):
        columns = slice(width - len(part), width) if side == "left" else slice(0, len(part))
        out[number, columns] = torch.from_numpy(np.ascontiguousarray(part)).to(dtype)
    return out


def _advantages(samples: Sequence[TrainSample], advantages: Sequence[float | Sequence[float]]) -> list[Any]:
    if len(advantages) != len(samples):
        raise TrainError(f"advantages has {len(advantages)} elements for {len(samples)} samples")
    masked = []
    for sample, value in zip(samples, advantages, strict=True):
        numbers = np.asarray(value, np.float32)
        if numbers.shape not in ((), sample.input_ids.shape):
            raise TrainError(
                f"advantages of trajectory {sample.trajectory_id} have shape {numbers.shape}; give one number, or one "
                f"for each of its {len(sample.input_ids)} tokens"
            )
        masked.append(np.where(sample.loss_mask, numbers, np.float32(0)))
    return masked


def tool_response_ids(
    renderer: Renderer, calls: Sequence[ToolCall], answers: Sequence[str], tools: Sequence[ToolSchema] = ()
) -> TokenIds:
    """Return the ids to append after a turn of calls that ended with its stop token.

    Args:
        renderer: See :func:`~turnwise.chat.renderer.load_renderer`.
        calls: The calls of that turn, in order.
        answers: Results of the first calls, in the same order; at least one.
        tools: The tools of the prompt.

    Returns:
        The results and the next generation prompt, int32 of shape [tokens], without the sampled stop token.

    Raises:
        RenderError: The template cannot render them, or the suffix is not proven independent of the history.
    """
    if not calls or not 0 < len(answers) <= len(calls):
        raise RenderError(
            f"answers: {len(answers)} answers to {len(calls)} calls; give each call's, in the order of the calls"
        )
    ids = [call.id or f"call{number:05d}" for number, call in enumerate(calls)]
    caller = Canonical(
        "assistant",
        "",
        calls=tuple(CanonicalCall(call.name, "{}", {}, call_id) for call, call_id in zip(calls, ids, strict=True)),
    )
    new = [
        Canonical("tool", text, answers=number, call_id=ids[number], call_name=calls[number].name)
        for number, text in enumerate(answers)
    ]
    tail = renderer.render([Canonical("user", "?")], tools)
    # How a turn with a call ends in this format; the call's content does not matter to what follows.
    token_ids = renderer.completion(
        {"role": "assistant", "content": "", "tool_calls": [ToolCall(ids[0], calls[0].name, {})]}, tools
    )
    following = renderer.extend(tail, token_ids, caller, new, tools)
    if following is None:
        names = ", ".join(call.name for call in calls)
        raise RenderError(f"this chat template cannot continue after calls of {names}: {renderer.why}")
    return following
