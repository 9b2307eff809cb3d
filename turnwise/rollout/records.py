"""The file of trained rows (``batches.jsonl``) of a run, for its audit.

It has one JSON object a line. ``{"event": "start", "schema_version": 1, "part": p, "after_step": n,
"max_tokens": m}`` when process ``p`` resumes after step ``n`` (which voids earlier records of later steps), then one
record for each train step and epoch, written before its update. Processes with exact numerics add their ``kernels``
to the first::

    {"step": 3, "epoch": 0, "rows": [{"trajectory": ..., "leaf": 4, "tokens": 61, "spans": [[30, 52]], "digest": ...}]}

A record of another policy than ``main`` names it as ``policy``. What a teacher was told of turns is in ``contexts``:
lists of trajectory, number of the turn, and text.

``{"event": "undo", "step": 3, "records": 1}`` voids the last records of a step: their update failed before it changed
anything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson

from turnwise.agents.roles import MAIN
from turnwise.append_file import AppendFile
from turnwise.errors import FormatError
from turnwise.media_files import media_spans
from turnwise.trajectory import TrainSample

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One trained row.

    Attributes:
        step: The train step, counted from 1.
        epoch: Pass over the rows of this step, from 0.
        spans: Trained positions, as (start, end) in order.
        max_tokens: Truncation length, or None.
        policy: The policy that was updated.
    """

    step: int
    epoch: int
    trajectory: str
    leaf: int
    tokens: int
    spans: tuple[tuple[int, int], ...]
    digest: str
    max_tokens: int | None
    policy: str = MAIN


@dataclass(frozen=True, slots=True)
class Batches:
    """Contents of a file of batches.

    Attributes:
        rolled_back: Steps after the last checkpoint of a killed process.
        starts: (process index, step resumed from), in order.
        torn: Whether the last line is cut off by a kill.
        kernels: By process index what the bits of its exact numerics depend on; processes without them have none.
        by_step: The rows of each step, in order; none where no group had a learning signal.
        contexts: By step and policy the texts that its teacher read, by trajectory and turn.
        rollbacks: Number of steps that loaded the weights of an earlier one.
    """

    rows: list[BatchRow]
    steps: int
    rolled_back: int
    starts: tuple[tuple[int, int], ...]
    torn: bool
    kernels: dict[int, str] = field(default_factory=dict)
    by_step: dict[int, list[BatchRow]] = field(default_factory=dict)
    contexts: dict[tuple[int, str], dict[tuple[str, int], str]] = field(default_factory=dict)
    rollbacks: int = 0


def loss_spans(sample: TrainSample) -> list[tuple[int, int]]:
    """Return the runs of trained positions of a row, as (start, end) in order."""
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def row_digest(sample: TrainSample) -> str:
    """Return a digest (blake2b-64, hexadecimal) of a row's ids, mask, rollout logprobs, weight versions and images."""
    digest = hashlib.blake2b(digest_size=8)
    for array, kind in (
        (sample.input_ids, "<i4"),
        (sample.loss_mask, "|b1"),
        (sample.rollout_logprobs, "<f4"),
        (sample.weight_versions, "<i4"),
    ):
        digest.update(np.ascontiguousarray(array, dtype=kind).tobytes())
    for media in media_spans(sample.media):
        digest.update(" ".join(map(str, media)).encode())
    return digest.hexdigest()


class BatchWriter:
    """Appends the rows of train steps to a file; each record is in the file when :meth:`write` returns.

    Args:
        path: The file; its folder is created.
        part: Index of this process among those of the run, from 0; by default the number of starts in the file.
        after_step: Step of the checkpoint resumed from; 0 at the beginning.
        max_tokens: Truncation length of rows, if any.
        kernels: What the bits of its exact numerics depend on, if it has them.

    Attributes:
        records: Number of step records that this process wrote.
    """

    def __init__(
        self, path: Path, *, part: int | None = None, after_step: int = 0, max_tokens: int | None = None,
        kernels: str | None = None,
    ) -> None:  # fmt: skip
        self.records = 0
        start = {
            "event": "start",
            "schema_version": SCHEMA_VERSION,
            "part": part,
            "after_step": after_step,
            "max_tokens": max_tokens,
            **({} if kernels is None else {"kernels": kernels}),
        }
        self._file = AppendFile(path)
        self._file.append(orjson.dumps(start))

    def write(
        self, step: int, samples: Sequence[TrainSample], *, epoch: int = 0, policy: str = MAIN,
        contexts: Mapping[tuple[str, int], str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Append the rows of a step that train a policy. Raises DiskError where the disk refuses."""
        rows = [
            {
                "trajectory": sample.trajectory_id,
                "leaf": sample.leaf,
                "tokens": len(sample.input_ids),
                "spans": loss_spans(sample),
                "digest": row_digest(sample),
            }
            for sample in samples
        ]
        rare: dict[str, Any] = {} if policy == MAIN else {"policy": policy}
        if contexts:
            rare["contexts"] = [[*turn, text] for turn, text in contexts.items()]
        self._file.append(orjson.dumps({"step": step, "epoch": epoch, **rare, "rows": rows}))
        self.records += 1

    def roll_back(self, step: int, approved: int) -> None:
        """Record that a step loaded the weights of an earlier one. Raises DiskError where the disk refuses."""
        self._file.append(orjson.dumps({"step": step, "epoch": 0, "rows": [], "rolled_back_to": approved}))

    def undo(self, step: int, records: int) -> None:
        """Void the last records of a step: nothing was trained. Raises DiskError where the disk refuses."""
        if records:
            self._file.append(orjson.dumps({"event": "undo", "step": step, "records": records}))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def read_batches(path: Path) -> Batches:
    """Read a file of batches.

    Raises:
        FormatError: A line is damaged in a way that no kill explains, or has another schema version.
    """
    records: list[tuple[int, list[BatchRow], str, list[Any], bool]] = []
    rolled_back: set[int] = set()
    starts: list[tuple[int, int]] = []
    kernels: dict[int, str] = {}
    max_tokens: int | None = None
    torn = False
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            following = next((later for later in lines[number:] if later), b"")
            if following and not following.startswith(b'{"event":"start"'):
                raise FormatError(f"{path}:{number}: not JSON: {error}") from error
            torn = True
            continue
        try:
            if record.get("event") == "undo":
                for _ in range(int(record["records"])):
                    if not records or records[-1][0] != int(record["step"]):
                        raise ValueError("it undoes a record that is not before it")
                    records.pop()
            elif record.get("event") == "start":
                if record["schema_version"] != SCHEMA_VERSION:
                    raise ValueError(f"schema version {record['schema_version']}; expected {SCHEMA_VERSION}")
                after_step, max_tokens = int(record["after_step"]), record["max_tokens"]
                starts.append((len(starts) if record["part"] is None else int(record["part"]), after_step))
                if "kernels" in record:
                    kernels[starts[-1][0]] = str(record["kernels"])
                rolled_back |= {step for step, *_ in records if step > after_step}
                records = [entry for entry in records if entry[0] <= after_step]
            else:
                rows = [_row(record, row, max_tokens) for row in record["rows"]]
                policy = str(record.get("policy", MAIN))
                went_back = "rolled_back_to" in record
                records.append((int(record["step"]), rows, policy, record.get("contexts", []), went_back))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path}:{number}: malformed batch record: {error!r}") from error
    by_step: dict[int, list[BatchRow]] = {}
    for step, rows, *_ in records:
        by_step.setdefault(step, []).extend(rows)
    all_rows = [row for _, rows, *_ in records for row in rows]
    contexts = {
        (step, policy): {(str(trajectory), int(turn)): str(text) for trajectory, turn, text in texts}
        for step, _, policy, texts, _ in records
        if texts
    }
    rollbacks, killed = sum(record[-1] for record in records), len(rolled_back)
    return Batches(all_rows, len(by_step), killed, tuple(starts), torn, kernels, by_step, contexts, rollbacks)


def _row(record: dict[str, Any], row: dict[str, Any], max_tokens: int | None) -> BatchRow:
    spans = tuple((int(start), int(end)) for start, end in row["spans"])
    return BatchRow(
        step=int(record["step"]),
        epoch=int(record["epoch"]),
        trajectory=str(row["trajectory"]),
        leaf=int(row["leaf"]),
        tokens=int(row["tokens"]),
        spans=spans,
        digest=str(row["digest"]),
        policy=str(record.get("policy", MAIN)),
        max_tokens=max_tokens,
    )


_ATTEMPT = re.compile(r"(/\d+)\.\d+(?=/|$)")


def without_attempt(trajectory_id: str) -> str:
    """Return the id of a trajectory or session without the numbers of process and attempt, which resumes change."""
    return _ATTEMPT.sub(r"\1", trajectory_id.partition("-")[2])
