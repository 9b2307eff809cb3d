"""What a person sees of a trajectory."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from turnwise.errors import FormatError
from turnwise.evaluation.view import Selection, show
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TrajectoryWriter
from turnwise.types import StopReason, as_ids


def sampled(index: int, parent: int, turn: str, message: dict, **changes: object) -> Segment:
    ids = as_ids([7, 8])
    return Segment(
        index,
        parent,
        "sampled",
        ids,
        (message,),
        turn,
        np.full(2, -0.5, np.float32),
        ((4, 0, 2),),
        **{"finish_reason": "stop", **changes},
    )


def forked(name: str = "g/0.0", task: str = "lookup-7") -> Trajectory:
    message = {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm hm"}
    answer = {"role": "tool", "name": "team_of", "content": "red", "tool_call_id": "c0"}
    call = {"id": "c0", "type": "function", "function": {"name": "team_of", "arguments": {"person": "mia"}}}
    segments = [
        Segment(0, -1, "context", as_ids([1, 2]), ({"role": "user", "content": "Who manages [bold]mia[/bold]?"},)),
        sampled(1, 0, "t0", {**message, "tool_calls": [call]}),
        Segment(2, 1, "context", as_ids([3]), (answer,)),
        sampled(3, 2, "t1", {"role": "assistant", "content": "It is zoe"}, finish_reason="length"),
        sampled(4, 0, "t2", {"role": "assistant", "content": "Another way"}, fork="resample"),
    ]  # fmt: skip
    return Trajectory(
        name, name, "g", task, segments=segments, rewards=[("t0", "lookup", 0.25), (None, "bonus", -0.5)],
        stop_reason=StopReason.MAX_TOKENS, seed=9,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    writer = TrajectoryWriter(tmp_path / "trajectories.twz")
    for number in range(5):
        writer.write(forked(f"g/{number}.0", f"task-{number % 2}"))
    writer.close()
    return tmp_path


def shown(source: Path, selection: Selection, **options: bool) -> str:
    console = Console(file=io.StringIO(), width=100)
    show(source, selection, console=console, **options)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_view_shows_messages_calls_rewards_and_branches(run: Path) -> None:
    text = shown(run, Selection(number=1))
    for part in (
        "Who manages [bold]mia[/bold]?", 'team_of({"person":"mia"})', "hm hm", "Let me see.", "tool team_of", "red",
        "cut off", "max_tokens", "reward -0.25", "lookup +0.25", "bonus -0.5", "resample", "branch 2 of 2", "seed 9",
    ):  # fmt: skip
        assert part in text, part
    assert text.count("Who manages") == 1, "a shared segment is shown once"


def test_the_newest_are_shown_and_the_others_counted(run: Path) -> None:
    text = shown(run, Selection(number=2))
    assert "g/2.0" not in text
    assert text.index("g/3.0") < text.index("g/4.0")
    assert "2 of 5 trajectories" in text


def test_a_selection_by_task_and_id(run: Path) -> None:
    assert "2 of 2 trajectories (5 in" in shown(run, Selection(task="task-1"))
    assert "1 of 1 trajectories" in shown(run, Selection(trajectory="g/1.0"))


def test_tokens_are_shown_on_request(run: Path) -> None:
    assert "ids [7, 8]" not in shown(run, Selection(number=1))
    text = shown(run, Selection(number=1), tokens=True)
    assert "ids [7, 8]" in text
    assert "version 4: [0, 2)" in text


def test_error_and_missing_messages_are_shown(tmp_path: Path) -> None:
    trajectory = forked()
    trajectory.error = "EnvError: reset raised"
    trajectory.segments = [Segment(0, -1, "context", as_ids([1, 2]))]
    file = tmp_path / "some.twz"
    writer = TrajectoryWriter(file)
    writer.write(trajectory)
    writer.close()
    text = shown(file, Selection())
    assert "EnvError: reset raised" in text
    assert "2 ids (messages were not saved)" in text


def test_control_codes_of_a_terminal_are_shown_not_obeyed(tmp_path: Path) -> None:
    trajectory = forked()
    evil = {"role": "assistant", "content": "a\x1b[2Jb\x07\x9bc\n\td", "reasoning_content": "\x1b]0;title\x07"}
    trajectory.segments = [Segment(0, -1, "context", as_ids([1])), sampled(1, 0, "t0", evil)]
    file = tmp_path / "some.twz"
    writer = TrajectoryWriter(file)
    writer.write(trajectory)
    writer.close()
    text = shown(file, Selection())
    assert "a␛[2Jb␇\ufffdc" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_empty_selection_raises_with_its_criteria(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds 5 trajectories, none with task 'nope'"):
        shown(run, Selection(task="nope"))
    with pytest.raises(FormatError, match=r"no such file: .*nowhere"):
        shown(tmp_path / "nowhere", Selection())
    TrajectoryWriter(tmp_path / "none.twz").close()
    with pytest.raises(FormatError, match=r"none\.twz holds no trajectory: no episode has ended$"):
        shown(tmp_path / "none.twz", Selection())
    (run / "trajectories.twz").write_bytes(b"{}\n")
    with pytest.raises(FormatError, match=r"trajectories.twz is no file of trajectories: it begins with b'{}"):
        shown(run, Selection())
