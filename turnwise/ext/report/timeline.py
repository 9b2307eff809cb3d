"""The command ``turnwise timeline``: what of a run ran when, drawn as text or written as a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer

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


_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_NAMES: Final = 12
_ROWS: Final = (("trainer", {WAIT: "·", UPDATE: "█"}), ("weights", {SYNC: "█"}))
_RARE: Final = (("evaluation", {EVALUATION: "█"}), ("checkpoint", {CHECKPOINT: "█"}))


@dataclass(frozen=True, slots=True)
class Window:
    """A drawn interval of a process, in seconds since its start."""

    part: Part
    begin: float
    end: float

    @classmethod
    def of(cls, part: Part, seconds: tuple[float | None, float | None] = (None, None)) -> Window:
        """Return the window between two times; by default from the first span to the last."""
        first = min((span.begin for span in part.spans), default=0.0)
        begin, end = seconds
        begin = first if begin is None else begin
        end = part.seconds if end is None else end
        return cls(part, begin, max(end, begin + 1e-3))

    def spans(self, what: str) -> list[Span]:
        """Return the spans of one kind that overlap the window, by begin."""
        spans = [span for span in self.part.spans if span.what == what and self._overlaps(span)]
        return sorted(spans, key=lambda span: span.begin)

    def until(self, span: Span) -> float:
        """Return the end of a span; open ones end with the process."""
        return self.part.seconds if span.end is None else span.end

    def _overlaps(self, span: Span) -> bool:
        # The work that was interrupted last has no length.
        if span.begin == (until := self.until(span)):
            return self.begin <= span.begin <= self.end
        return span.begin < self.end and until > self.begin


def draw_text(window: Window, *, width: int = 100) -> list[str]:
    """Return the lines of a drawing with ``width`` columns of time.

    A column is marked where the work took most of it, or where a short span would otherwise be invisible.
    """
    step = (window.end - window.begin) / width
    rows = list(_ROWS) + [(name, marks) for name, marks in _RARE if any(window.spans(what) for what in marks)]
    flying = _mean_flying(window, width, step)
    largest = max(flying, default=0.0)
    peak = f"at most {round(largest)} groups in flight"
    head = f"{window.part.mode}, {window.end - window.begin:.2f} s, a column is {step:.3f} s; {peak}"
    levels = [_LEVELS[0 if not level else max(1, round(level / largest * (len(_LEVELS) - 1)))] for level in flying]
    lines = [head, "", _row("rollouts", levels)]
    for name, marks in rows:
        cells = [" "] * width
        for what, mark in marks.items():
            for span in window.spans(what):
                first, end_column = _columns(span, window, width, step)
                cells[first : end_column + 1] = [mark] * (end_column + 1 - first)
        lines.append(_row(name, cells))
    lines.append(_row("step", _labels(window, width, step)))
    return lines


def trace_json(window: Window) -> bytes:
    """Return the spans that overlap the window, uncut, as Chrome trace events.

    The process of the run is a process of the trace, each row a thread, and the number of groups in flight a counter.
    Spans of a row that overlap take further threads, since those of one thread may only nest. Times are in microseconds
    since the process began.
    """
    events = [_name_event("process_name", window.part, 0, f"{window.part.mode}, process {window.part.number}")]
    tid = 0
    for row, marks in (("rollouts", {GROUP: ""}), *_ROWS, *_RARE):
        spans = sorted((span for what in marks for span in window.spans(what)), key=lambda span: span.begin)
        for number, lane in enumerate(_lanes(window, spans), 1):
            tid += 1
            events.append(_name_event("thread_name", window.part, tid, row if number == 1 else f"{row} {number}"))
            events.append(_event("M", "thread_sort_index", window.part, tid, args={"sort_index": tid}))
            events += [_complete(window, span, tid) for span in lane]
    changes: Counter[int] = Counter()
    for span in window.spans(GROUP):
        changes[_us(span.begin)] += 1
        changes[_us(window.until(span))] -= 1
    for ts, flying in zip(sorted(changes), accumulate(changes[ts] for ts in sorted(changes)), strict=True):
        events.append(_event("C", "groups in flight", window.part, 0, ts=ts, args={"groups": flying}))
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _complete(window: Window, span: Span, tid: int) -> dict[str, Any]:
    ts = _us(span.begin)
    event = _event("X", f"{span.what} {span.name}", window.part, tid, ts=ts, dur=_us(window.until(span)) - ts)
    return {**event, "cat": span.what, "args": {"finished": span.end is not None}}


def _name_event(event: str, part: Part, tid: int, name: str) -> dict[str, Any]:
    return _event("M", event, part, tid, args={"name": name})


def _event(phase: str, name: str, part: Part, tid: int, **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": part.number, "tid": tid, **rest}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _lanes(window: Window, spans: Sequence[Span]) -> list[list[Span]]:
    """Assign spans, given by begin, to lanes without overlap."""
    lanes: list[list[Span]] = []
    for span in spans:
        free = next((lane for lane in lanes if window.until(lane[-1]) <= span.begin), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _mean_flying(window: Window, width: int, step: float) -> list[float]:
    """Return the mean number of groups in flight per column."""
    means = [0.0] * width
    for span in window.spans(GROUP):
        begin, end = max(span.begin, window.begin), min(window.until(span), window.end)
        for column in range(int((begin - window.begin) / step), min(width, int((end - window.begin) / step) + 1)):
            start = window.begin + column * step
            means[column] += max(0.0, min(end, start + step) - max(begin, start)) / step
    return means


def _columns(span: Span, window: Window, width: int, step: float) -> tuple[int, int]:
    first = round((max(span.begin, window.begin) - window.begin) / step)
    end_column = round((min(window.until(span), window.end) - window.begin) / step) - 1
    first = min(first, width - 1)
    return first, min(max(first, end_column), width - 1)


def _labels(window: Window, width: int, step: float) -> Sequence[str]:
    """Return step numbers at the begin of their first update, as far as they fit."""
    cells, free, labels = [" "] * width, 0, set[str]()
    for span in window.spans(UPDATE):
        first, _ = _columns(span, window, width, step)
        if span.name in labels or first < free or first + len(span.name) > width:
            continue
        labels.add(span.name)
        cells[first : first + len(span.name)] = span.name
        free = first + len(span.name) + 1
    return cells


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<{_NAMES}}{''.join(cells)}".rstrip()


def timeline(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    part: Annotated[
        int, typer.Option("--part", help="Which process of the run, from 0; -1 is the last one.", show_default=True)
    ] = -1,
    begin: Annotated[float | None, typer.Option("--from", help="Seconds since that process began.")] = None,
    end: Annotated[float | None, typer.Option("--to", help="Seconds since that process began.")] = None,
    width: Annotated[int, typer.Option("--width", min=20, help="Columns of the time axis.")] = 100,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a trace for Perfetto or chrome://tracing to this file instead."),
    ] = None,
) -> None:
    """Draw what ran when: rollouts, the trainer, weights on their way, evaluations and checkpoints."""
    parts = read_timeline(run / "timeline.jsonl")
    if not -len(parts) <= part < len(parts):
        raise TurnwiseError(f"--part is {part}, but {run} had {len(parts)} processes: 0 is the first, -1 the last")
    window = Window.of(parts[part], (begin, end))
    if trace is None:
        typer.echo("\n".join(draw_text(window, width=width)))
        return
    trace.write_bytes(trace_json(window))
    typer.echo(f"written: {trace}")
