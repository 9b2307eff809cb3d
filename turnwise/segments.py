"""What a trajectory consists of: runs of ids, each added to a branch at once.

Owns: :class:`Segment` and the form in which it is written. Refuses: making segments; only ``inference/session.py`` and
what it owns do that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from turnwise.types import FinishReason, Logprobs, TokenIds, VersionSpan

SegmentKind = Literal["context", "sampled"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of ids that was added to a branch at once. Immutable.

    Attributes:
        index: Its place in ``Trajectory.segments``, in commit order (a parent stands before its children).
        parent: Index of the segment before it, -1 for a root.
        kind: ``context`` (``loss_mask`` 0) or ``sampled`` (``loss_mask`` 1).
        ids: int32 of shape [tokens].
        messages: What the ids mean, as JSON: the messages that a request added, or the one assistant message.
        turn_id: Names the turn; sampled segments only.
        logprobs: float32 of shape [tokens], sampled segments only.
        weight_versions: Spans over ``ids``, sampled segments only.
        finish_reason: Sampled segments only.
        fork: Why this segment is not the first child of its parent, or None.
        tools: Root contexts only: the tools of the root, as JSON.
        template_args: Root contexts only: what a request gave the chat template besides, or None.
        left_out: Sampled segments only: spans of ids that the agent's own account of the episode leaves out, so that
            they are not trained; None where it is all there.
    """

    index: int
    parent: int
    kind: SegmentKind
    ids: TokenIds
    messages: tuple[dict[str, Any], ...] = ()
    turn_id: str | None = None
    logprobs: Logprobs | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None
    fork: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    template_args: dict[str, Any] | None = None
    left_out: tuple[tuple[int, int], ...] | None = None

    @property
    def sampled(self) -> bool:
        """Whether the policy sampled these ids."""
        return self.kind == "sampled"

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Which of the ids are trained: a new mask of shape [tokens], all of them where the policy sampled them and the
        agent left none out.
        """
        mask = np.full(len(self.ids), self.sampled, np.bool_)
        for start, end in self.left_out or ():
            mask[start:end] = False
        return mask


_SEGMENT_FIELDS = ("index", "parent", "kind", "ids", "messages")
_SAMPLED_FIELDS = ("turn_id", "logprobs", "weight_versions", "finish_reason")
_RARE_FIELDS = ("fork", "tools", "template_args", "left_out")


def segment_record(segment: Segment) -> dict[str, Any]:
    """Return a segment as what orjson writes; :func:`read_segment` reads it back."""
    record = {name: getattr(segment, name) for name in _SEGMENT_FIELDS + _SAMPLED_FIELDS * segment.sampled}
    return record | {name: held for name in _RARE_FIELDS if (held := getattr(segment, name)) is not None}


def read_segment(record: dict[str, Any]) -> Segment:
    """Read what :func:`segment_record` gave and JSON kept.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError or ValueError: A field is missing or malformed.
    """
    logprobs = record.get("logprobs")
    tools, given = record.get("tools"), record.get("template_args")
    left_out = record.get("left_out")
    return Segment(
        index=record["index"],
        parent=record["parent"],
        kind=record["kind"],
        ids=np.asarray(record["ids"], np.int32),
        messages=_listed(record["messages"]),
        turn_id=record.get("turn_id"),
        logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        weight_versions=tuple((int(v), int(s), int(e)) for v, s, e in record.get("weight_versions", ())),
        finish_reason=record.get("finish_reason"),
        fork=record.get("fork"),
        tools=None if tools is None else _listed(tools),
        template_args=json.loads(given) if isinstance(given, str) else given,
        left_out=None if left_out is None else tuple((int(start), int(end)) for start, end in left_out),
    )


def _listed(value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(value) if isinstance(value, str) else value)
