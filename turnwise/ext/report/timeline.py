"""The command ``turnwise timeline``: what of a run ran when, as a trace for Perfetto."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer

from turnwise.cli.options import CommandResult
from turnwise.errors import FormatError, TurnwiseError
from turnwise.trainer.observe.timeline import CHECKPOINT, EVALUATION, GROUP, SYNC, UPDATE, WAIT


@dataclass(frozen=True, slots=True)
class Span:
    """One span of work.

    Attributes:
        what: One of :data:`~turnwise.trainer.observe.timeline.KINDS`.
        name: The step, version, group id or label.
        begin: Seconds since its process began.
        end: Likewise; None if the process ended first.
    """

    what: str
    name: str
    begin: float
    end: float | None


@dataclass(slots=True)
class Part:
    """The spans of one process of a run.

    Attributes:
        number: Number of the process, from 0.
        mode: The training mode.
        at: Start, in unix time.
        spans: In order of ending.
    """

    number: int
    mode: str
    at: float
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Duration, as far as covered by its spans."""
        return max((span.begin if span.end is None else span.end for span in self.spans), default=0.0)

    def until(self, span: Span) -> float:
        """Return the end of a span; open ones end with the process."""
        return self.seconds if span.end is None else span.end


def read_timeline(path: Path) -> list[Part]:
    """Return the spans of each process; a partial line of a killed one is skipped.

    Raises:
        FormatError: There is no such file, or a line is malformed.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error}; runs write it while they train") from error
    parts: list[Part] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith((b"}", b"]")):
            continue
        try:
            record = orjson.loads(line)
            if isinstance(record, dict):
                parts.append(Part(int(record["part"]), str(record["mode"]), float(record["at"])))
            else:
                what, name, begin, end = record
                parts[-1].spans.append(Span(str(what), str(name), float(begin), None if end is None else float(end)))
        except (orjson.JSONDecodeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path}:{number}: no record of a timeline: {error!r}") from error
    return parts


_ROWS: Final = (
    ("rollouts", (GROUP,)),
    ("trainer", (WAIT, UPDATE)),
    ("weights", (SYNC,)),
    ("evaluation", (EVALUATION,)),
    ("checkpoint", (CHECKPOINT,)),
)


def trace_json(part: Part) -> bytes:
    """Return the spans of a process as Chrome trace events.

    The process of the run is a process of the trace, each row a thread, and the number of groups in flight a counter.
    Spans of a row that overlap take further threads, since those of one thread may only nest. Times are in microseconds
    since the process began. A span that was interrupted lasts until the end of its process.
    """
    events = [_name_event("process_name", part, 0, f"{part.mode}, process {part.number}")]
    tid = 0
    changes: Counter[int] = Counter()
    for row, kinds in _ROWS:
        spans = sorted((span for span in part.spans if span.what in kinds), key=lambda span: span.begin)
        for number, lane in enumerate(_lanes(part, spans), 1):
            tid += 1
            events.append(_name_event("thread_name", part, tid, row if number == 1 else f"{row} {number}"))
            events.append(_event("M", "thread_sort_index", part, tid, args={"sort_index": tid}))
            events += [_complete(part, span, tid) for span in lane]
        for span in spans:
            if span.what == GROUP:
                changes[_us(span.begin)] += 1
                changes[_us(part.until(span))] -= 1
    for ts, flying in zip(sorted(changes), accumulate(changes[ts] for ts in sorted(changes)), strict=True):
        events.append(_event("C", "groups in flight", part, 0, ts=ts, args={"groups": flying}))
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _complete(part: Part, span: Span, tid: int) -> dict[str, Any]:
    ts = _us(span.begin)
    event = _event("X", f"{span.what} {span.name}", part, tid, ts=ts, dur=_us(part.until(span)) - ts)
    return {**event, "cat": span.what, "args": {"finished": span.end is not None}}


def _name_event(event: str, part: Part, tid: int, name: str) -> dict[str, Any]:
    return _event("M", event, part, tid, args={"name": name})


def _event(phase: str, name: str, part: Part, tid: int, **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": part.number, "tid": tid, **rest}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _lanes(part: Part, spans: Sequence[Span]) -> list[list[Span]]:
    """Assign spans, given by begin, to lanes without overlap."""
    lanes: list[list[Span]] = []
    for span in spans:
        free = next((lane for lane in lanes if part.until(lane[-1]) <= span.begin), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def timeline(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write, for ui.perfetto.dev or chrome://tracing.")
    ] = Path("trace.json"),
    part: Annotated[
        int, typer.Option("--part", help="Which process of the run, from 0; -1 is the last one.", show_default=True)
    ] = -1,
) -> CommandResult:
    """Write what ran when as a trace: rollouts, the trainer, weights on their way, evaluations and checkpoints."""
    parts = read_timeline(run / "timeline.jsonl")
    if not -len(parts) <= part < len(parts):
        raise TurnwiseError(f"--part is {part}, but {run} had {len(parts)} processes: 0 is the first, -1 the last")
    out.write_bytes(trace_json(parts[part]))
    typer.echo(f"written: {out}")
    return CommandResult({"file": out, "part": part % len(parts), "parts": len(parts)})
