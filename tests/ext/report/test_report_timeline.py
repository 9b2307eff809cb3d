"""What ran when: written, read, and written as a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.cli import main
from turnwise.errors import FormatError
from turnwise.ext.report.timeline import Part, Span, read_timeline, trace_json
from turnwise.trainer.observe.timeline import Timeline

# Two groups, of which the second reaches into the update of step 1; ten seconds.
PART = Part(0, "separate_async", 0.0, [
    Span("group", "a", 2.0, 6.0),
    Span("wait", "1", 2.0, 6.0),
    Span("update", "1", 6.0, 9.0),
    Span("sync", "1", 9.0, 10.0),
    Span("group", "b", 2.0, 8.0),
    Span("checkpoint", "1", 11.0, 12.0),
])  # fmt: skip


def test_spans_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    timeline = Timeline(file, part=0, mode="sync")
    with timeline.span("group", "g"):
        with timeline.span("wait", 1):
            pass
        overlap_before = timeline.overlap
        with timeline.span("update", 1):
            pass
        assert timeline.overlap > overlap_before == 0.0
    # No group is in flight any more: an update overlaps nothing.
    overlap = timeline.overlap
    with timeline.span("update", 2):
        pass
    assert timeline.overlap == overlap
    with timeline.span("group", "cut off"):
        timeline.close()
    with file.open("ab") as torn:
        torn.write(b'["wait","2",1')
    Timeline(file, part=1, mode="colocate_async").close()
    first, second = read_timeline(file)
    assert [(span.what, span.name) for span in first.spans] == [
        ("wait", "1"), ("update", "1"), ("group", "g"), ("update", "2"), ("group", "cut off"),
    ]  # fmt: skip
    assert [span.end is None for span in first.spans] == [False] * 4 + [True]
    assert all(span.end is None or span.begin <= span.end <= first.seconds for span in first.spans)
    assert (first.number, first.mode, second.number, second.mode) == (0, "sync", 1, "colocate_async")
    assert second.spans == []


def test_malformed_timeline_raises_format_error(tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    with pytest.raises(FormatError, match=r"timeline.jsonl cannot be read"):
        read_timeline(file)
    file.write_text('["wait","1",0,1]\n')
    with pytest.raises(FormatError, match=r"timeline.jsonl:1: no record of a timeline"):
        read_timeline(file)


def traced(part: Part) -> tuple[dict[int, str], list[dict[str, Any]], list[tuple[int, int]]]:
    """Return the names of a trace's threads, its spans, and its counts of groups in flight."""
    events = json.loads(trace_json(part))["traceEvents"]
    assert {event["pid"] for event in events} == {part.number}
    named = [event for event in events if event["name"] == "thread_name"]
    assert all(event["ph"] == "M" for event in named)
    flying = [(event["ts"], event["args"]["groups"]) for event in events if event["ph"] == "C"]
    spans = [event for event in events if event["ph"] == "X"]
    return {event["tid"]: event["args"]["name"] for event in named}, spans, flying


def test_the_trace_has_each_span_in_its_row() -> None:
    rows, spans, flying = traced(PART)
    assert {(rows[event["tid"]], event["name"], event["cat"], event["ts"], event["dur"]) for event in spans} == {
        ("rollouts", "group a", "group", 2_000_000, 4_000_000),
        ("rollouts 2", "group b", "group", 2_000_000, 6_000_000),
        ("trainer", "wait 1", "wait", 2_000_000, 4_000_000),
        ("trainer", "update 1", "update", 6_000_000, 3_000_000),
        ("weights", "sync 1", "sync", 9_000_000, 1_000_000),
        ("checkpoint", "checkpoint 1", "checkpoint", 11_000_000, 1_000_000),
    }
    assert len(spans) == len(PART.spans)
    assert all(event["args"]["finished"] for event in spans)
    assert flying == [(2_000_000, 2), (6_000_000, 1), (8_000_000, 0)]
    (process,) = (event for event in json.loads(trace_json(PART))["traceEvents"] if event["name"] == "process_name")
    assert process["args"]["name"] == "separate_async, process 0"


def test_an_interrupted_span_lasts_until_the_end_of_its_process_in_the_trace() -> None:
    part = Part(
        3, "sync", 0.0, [Span("wait", "1", 0.5, 2.5), Span("update", "1", 2.5, None), Span("group", "a", 1.0, 4.0)]
    )
    rows, spans, _ = traced(part)
    (update,) = (event for event in spans if event["cat"] == "update")
    assert (rows[update["tid"]], update["ts"], update["dur"]) == ("trainer", 2_500_000, 1_500_000)
    assert [event["cat"] for event in spans if not event["args"]["finished"]] == ["update"]


def test_interrupted_span_at_the_end_of_a_timeline_is_in_the_trace() -> None:
    part = Part(0, "sync", 0.0, [Span("wait", "1", 0.0, 2.0), Span("update", "1", 2.0, None)])
    _, spans, _ = traced(part)
    assert [(event["cat"], event["ts"], event["dur"]) for event in spans] == [
        ("wait", 0, 2_000_000),
        ("update", 2_000_000, 0),
    ]


def test_the_command_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl", part=0, mode="sync")
    with timeline.span("update", 1):
        pass
    timeline.close()
    with pytest.raises(SystemExit) as exit_:
        main(("timeline", str(tmp_path), "-o", str(tmp_path / "trace.json")))
    assert not exit_.value.code
    assert "trace.json" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["update 1"]
