"""Trajectories as a report holds them: a table of all, and compressed chunks of which single ones are read."""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson

from turnwise.errors import FormatError
from turnwise.report.runs import RunFacts
from turnwise.rollout.records import read_trajectories
from turnwise.trajectory import Segment, Trajectory, segment_record

CHUNK_BYTES: Final = 256 * 1024
"""JSON of a chunk, before compression: what is decoded to show one trajectory."""

_TOLERANCE = 1e-6
_DIGITS = 4
_LEVEL = 6
_SHOWN_ERROR = 300
_PLAIN = (
    "id", "episode_id", "group_id", "task_id", "agent", "policy", "rewards", "error", "metrics", "turn_metrics",
    "turn_notes", "states", "partition", "attempt", "reasoning", "recorded", "baseline",
)  # fmt: skip


def pack(value: Any) -> str:
    """Return a value as JSON, compressed (raw deflate) and in base64, as the page unpacks it."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    data = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return base64.b64encode(compressor.compress(data) + compressor.flush()).decode("ascii")


@dataclass(slots=True)
class TrajectoryTable:
    """The trajectories of one run, in the order of their file.

    Attributes:
        columns: A list per column (:func:`_row`), of equal lengths.
        chunks: Number of chunks.
        total: How many the file holds; those that are not in ``columns`` are older than a limit.
        token_ids: All ids that occur.
    """

    columns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    chunks: int = 0
    total: int = 0
    token_ids: set[int] = field(default_factory=set)

    @property
    def shown(self) -> int:
        """Number of trajectories in the report."""
        return len(self.columns["id"])


def chunks(facts: RunFacts, limit: int | None, table: TrajectoryTable) -> Iterator[str]:
    """Yield the packed chunks of a run's newest trajectories, and fill its table meanwhile.

    Args:
        facts: The run.
        limit: Most trajectories; None for all.
        table: An empty table.

    Raises:
        FormatError: A line of the file cannot be read; the message names file and line.
    """
    held: list[bytes] = []
    size = 0
    for trajectory in _newest(facts, limit, table):
        record = orjson.dumps(trajectory_record(trajectory, facts), option=orjson.OPT_SERIALIZE_NUMPY)
        if held and size + len(record) > CHUNK_BYTES:
            yield _chunk(held)
            table.chunks += 1
            held, size = [], 0
        for name, value in _row(trajectory, facts.success_reward).items():
            table.columns[name].append(value)
        table.columns["chunk"].append(table.chunks)
        table.columns["place"].append(len(held))
        for segment in trajectory.segments:
            table.token_ids.update(segment.token_ids.tolist())
        held.append(record)
        size += len(record)
    if held:
        yield _chunk(held)
        table.chunks += 1


def _chunk(records: list[bytes]) -> str:
    return pack([orjson.Fragment(record) for record in records])


def _newest(facts: RunFacts, limit: int | None, table: TrajectoryTable) -> Iterable[Trajectory]:
    if facts.trajectories is None:
        return
    newest: deque[Trajectory] = deque(maxlen=limit)
    try:
        for trajectory in read_trajectories(facts.trajectories):
            table.total += 1
            if limit is None:
                yield trajectory
            else:
                newest.append(trajectory)
    except FormatError as error:
        raise FormatError(
            f"{error}; leave this run out, or make the report with the version of Turnwise that wrote it"
        ) from error
    yield from newest


def _row(trajectory: Trajectory, success_reward: float) -> dict[str, Any]:
    """Return what the page's table, filters and failures need of a trajectory."""
    kinds = {
        name.removeprefix("tool_errors/"): int(count)
        for name, count in trajectory.metrics.items()
        if name.startswith("tool_errors/") and count
    }
    errors = max(int(trajectory.metrics.get("tool_errors", 0)), sum(kinds.values()))
    error = trajectory.error
    versions = [version for each in trajectory.segments for version, _, _ in each.weight_versions]
    return {
        "id": trajectory.id,
        "task": trajectory.task_id,
        "partition": trajectory.partition,
        "agent": trajectory.agent,
        "stop": str(trajectory.stop_reason),
        "reward": round(trajectory.reward, 6),
        "success": error is None and trajectory.reward >= success_reward - _TOLERANCE,
        "turns": sum(segment.sampled for segment in trajectory.segments),
        "tokens": trajectory.sampled_tokens,
        "calls": int(trajectory.metrics.get("tool_calls", 0)),
        "errors": errors,
        "kinds": kinds or None,
        "forks": sum(trajectory.forks().values()),
        "version": max(versions, default=None),
        "error": error if error is None or len(error) <= _SHOWN_ERROR else f"{error[:_SHOWN_ERROR]}...",
    }


def trajectory_record(trajectory: Trajectory, facts: RunFacts) -> dict[str, Any]:
    """Return all that the page shows of a trajectory, as orjson-serialisable values."""
    record = {name: getattr(trajectory, name) for name in _PLAIN}
    return {
        **record,
        "reward": trajectory.reward,
        "stop_reason": str(trajectory.stop_reason),
        # As text: a seed may have more digits than a number of JavaScript.
        "seed": str(trajectory.seed),
        "segments": [_segment(segment) for segment in trajectory.segments],
        "gaps": facts.gaps.get(trajectory.id, ()),
    }


def _segment(segment: Segment) -> dict[str, Any]:
    record = segment_record(segment)
    if segment.logprobs is not None:
        record["logprobs"] = np.round(segment.logprobs, _DIGITS)
    return record
