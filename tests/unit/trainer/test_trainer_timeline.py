"""What ran when: written, read and drawn."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from turnwise.errors import FormatError
from turnwise.trainer.observe.timeline import Part, Span, Timeline, Window, draw_svg, draw_text, read_timeline

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
        before = timeline.overlap
        with timeline.span("update", 1):
            pass
        assert timeline.overlap > before == 0.0
    # Nobody is on the way any more: an update overlaps nothing.
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
    assert [(each.what, each.name) for each in first.spans] == [
        ("wait", "1"), ("update", "1"), ("group", "g"), ("update", "2"), ("group", "cut off"),
    ]  # fmt: skip
    assert [each.end is None for each in first.spans] == [False] * 4 + [True]
    assert all(each.end is None or each.begin <= each.end <= first.seconds for each in first.spans)
    assert (first.number, first.mode, second.number, second.mode) == (0, "sync", 1, "colocate_async")
    assert second.spans == []


def test_what_is_no_timeline_is_told(tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    with pytest.raises(FormatError, match=r"timeline.jsonl cannot be read"):
        read_timeline(file)
    file.write_text('["wait","1",0,1]\n')
    with pytest.raises(FormatError, match=r"timeline.jsonl:1: no record of a timeline"):
        read_timeline(file)


def test_the_text_says_what_ran_in_each_column() -> None:
    assert draw_text(Window.of(PART), width=10) == [
        "separate_async, 10.00 s, a column is 1.000 s; at most 2 groups on their way",
        "",
        "rollouts    ████▄▄",
        "trainer     ····███",
        "weights            █",
        "checkpoint           █",
        "step            1",
    ]


def test_a_window_shows_a_stretch_of_it() -> None:
    lines = draw_text(Window.of(PART, (5.0, 7.0)), width=4)
    assert lines[2:5] == ["rollouts    ██▄▄", "trainer     ··██", "weights"]


def test_a_part_without_work_is_drawn_empty() -> None:
    assert draw_text(Window.of(Part(0, "sync", 0.0)), width=20)[2:] == ["rollouts", "trainer", "weights", "step"]


def test_the_picture_has_a_bar_for_each_piece_of_work() -> None:
    root = ElementTree.fromstring(draw_svg(Window.of(PART)))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(PART.spans)
    assert "update 1: 6.00 to 9.00 s" in titles
