"""Trajectories as columns of numbers and texts: how files keep them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from turnwise.errors import FormatError
from turnwise.trajectory import Segment, Trajectory, check_finite, dump_records, read_segment, segment_record
from turnwise.types import ReadMedia, Routes, WriteMedia

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
DTYPES = {
    "record": np.uint8, "segments": np.uint8, "messages": np.uint8, "token_ids": np.int32, "logprobs": np.float32,
    "routes": np.uint8,
}  # fmt: skip
"""The columns of a trajectory:

- ``record``: JSON of the trajectory without its segments
- ``segments``: JSON list of its segments without ids, log-probabilities and messages, with their lengths; images by
  digest, which are in the folder ``media/`` beside a file
- ``messages``: JSON list of the segments' messages and tools
- ``token_ids``: ids of all segments, one after the other
- ``logprobs``: log-probabilities of all sampled segments, one after the other
- ``routes``: bytes of the routed experts of all segments, one after the other
"""
_NO_IDS = np.empty(0, np.int32)
_NO_BYTES = np.empty(0, np.uint8)


def pack_trajectory(trajectory: Trajectory, media: WriteMedia | None = None) -> Columns:
    """Return a trajectory as columns; :func:`unpack_trajectory` is the inverse.

    Images are named by digest where ``media`` writes them, else ``segments`` holds their bytes.

    Raises:
        FormatError: It holds what JSON cannot, or a number that is not finite.
    """
    segments = trajectory.segments
    scored = [segment.logprobs for segment in segments if segment.logprobs is not None]
    check_finite(trajectory)
    shapes = [_shape(segment, media) for segment in segments]
    messages = [
        {"messages": segment.messages} | ({} if segment.tools is None else {"tools": segment.tools})
        for segment in segments
    ]
    return {
        "record": _bytes(replace(trajectory, segments=[]).to_bytes()),
        "segments": _bytes(dump_records(trajectory.id, shapes, shapes)),
        "messages": _bytes(dump_records(trajectory.id, messages, messages)),
        "token_ids": np.concatenate([_NO_IDS, *(segment.token_ids for segment in segments)], dtype=np.int32),
        "logprobs": np.concatenate([np.empty(0, np.float32), *scored], dtype=np.float32),
        "routes": np.concatenate([_NO_BYTES, *(_raw(segment.routes) for segment in segments)], dtype=np.uint8),
    }


def unpack_trajectory(row: Columns, media: ReadMedia | None = None) -> Trajectory:
    """Return the trajectory of columns: without segments if ``token_ids`` is missing, without messages and
    tools if ``messages`` is missing. ``media`` reads images that are only named.

    Raises:
        FormatError: The columns are damaged, or an image is missing.
    """
    trajectory = Trajectory.from_bytes(row["record"].tobytes())
    if "token_ids" not in row:
        return trajectory
    ids, logprobs, raw = row["token_ids"], row["logprobs"], row["routes"]
    try:
        shapes = orjson.loads(row["segments"].tobytes())
        texts = orjson.loads(row["messages"].tobytes()) if "messages" in row else [{"messages": ()}] * len(shapes)
        for shape, messages in zip(shapes, texts, strict=True):
            count, scored = shape.pop("lengths")
            tokens = {"token_ids": ids[:count], "logprobs": None if scored is None else logprobs[:scored]}
            if (routed := shape.pop("routed", None)) is not None:
                dtype, layers, chosen = routed
                size = count * layers * chosen * np.dtype(dtype).itemsize
                tokens["routes"] = raw[:size].view(dtype).reshape(count, layers, chosen)
                raw = raw[size:]
            trajectory.segments.append(read_segment({**shape, **messages, **tokens}, media))
            ids, logprobs = ids[count:], logprobs[scored or 0 :]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the columns of trajectory {trajectory.id!r} are damaged: {error!r}") from error
    if len(ids) or len(logprobs) or len(raw):
        raise FormatError(f"the columns of trajectory {trajectory.id!r} have more ids than its segments")
    return trajectory


def _shape(segment: Segment, media: WriteMedia | None) -> dict[str, Any]:
    bare = replace(segment, token_ids=_NO_IDS, logprobs=None, messages=(), tools=None, routes=None)
    record = segment_record(bare, media)
    routes = segment.routes
    if routes is not None:
        record["routed"] = [routes.dtype.str, *routes.shape[1:]]
    scored = None if segment.logprobs is None else len(segment.logprobs)
    shape = {name: value for name, value in record.items() if name not in ("token_ids", "logprobs", "messages")}
    return {**shape, "lengths": [len(segment.token_ids), scored]}


def _raw(routes: Routes | None) -> npt.NDArray[np.uint8]:
    return _NO_BYTES if routes is None else np.frombuffer(routes.tobytes(), np.uint8)


def _bytes(data: bytes) -> npt.NDArray[np.uint8]:
    # A copy that may be written, as torch wants it.
    return np.frombuffer(bytearray(data), np.uint8)
