"""Which trajectories a report holds, what it says of all, and that it says what an evaluation's summary does."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.report_pages import Page, played, unpack, write_run
from support.rollout.record_files import record_bytes
from turnwise.evaluation.metrics import summarize
from turnwise.ext.report.page import write_report
from turnwise.ext.report.runs import RunFacts
from turnwise.ext.report.trajectories import (
    Contents,
    Row,
    by_priority,
    chunks,
    episodes_of,
    error_counts,
    fit_into,
    halving,
    pack,
    part_figures,
    read_rows,
    task_columns,
    trajectory_record,
)
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.trajectory_file import located_trajectories


def rows_of(folder: Path, trajectories: list[Trajectory], **facts: Any) -> tuple[RunFacts, list[Row]]:
    run = RunFacts("a", "evaluation", write_run(folder, trajectories) / "trajectories.twz", **facts)
    return run, read_rows(run)


@given(count=st.integers(0, 200))
def test_halving_reaches_all_and_spreads_evenly(count: int) -> None:
    order = halving(count)
    assert sorted(order) == list(range(count))
    for size in range(2, count + 1):
        indices = sorted(order[:size])
        assert max(later - earlier for earlier, later in itertools.pairwise(indices)) <= 4 * count / size


def group(task: str, number: int, *, failed: bool = False) -> list[Trajectory]:
    error = "ToolError: down" if failed else None
    return [played(f"{task}.{number}.{member}", task, group_id=f"{task}-{number}", error=error) for member in range(2)]


def test_newest_group_of_every_task_comes_first_then_its_oldest(tmp_path: Path) -> None:
    _, rows = rows_of(tmp_path, [row for number in range(5) for task in "abcd" for row in group(task, number)])
    order = by_priority(rows)
    assert sorted(row.id for members in order for row in members) == sorted(row.id for row in rows)
    assert all(len({row.group for row in members}) == 1 and len(members) == 2 for members in order), "groups are whole"
    rounds = [[members[0].group for members in order[start : start + 4]] for start in range(0, 20, 4)]
    assert [{name.split("-")[1] for name in turn} for turn in rounds] == [{"4"}, {"0"}, {"2"}, {"1"}, {"3"}]
    tasks = [[name[0] for name in turn] for turn in rounds]
    assert all(turn == tasks[0] for turn in tasks), "tasks in the same order each time"


def test_every_fourth_group_has_an_error(tmp_path: Path) -> None:
    _, rows = rows_of(tmp_path, [row for number in range(40) for row in group(f"t{number}", 0, failed=number < 5)])
    failed = [members[0].error is not None for members in by_priority(rows)]
    assert failed[:20] == [True, False, False, False] * 5
    assert not any(failed[20:])


def test_two_runs_keep_groups_of_the_same_tasks(tmp_path: Path) -> None:
    orders = []
    for name, names in (("one", range(50)), ("two", reversed(range(50)))):
        _, rows = rows_of(tmp_path / name, [played(f"{task}", f"task-{task}") for task in names])
        orders.append([members[0].task for members in by_priority(rows)])
    assert orders[0] == orders[1] != sorted(orders[0])


def several_sessions() -> list[Trajectory]:
    trajectories = []
    for number, task in enumerate("aabbc"):
        common = {"group_id": f"0-val-{task}-e0~sampled", "partition": "val", "episode_id": f"e{number}"}
        rewards = [("t0", "score", 0.25 * number)]
        trajectories += [
            played(f"e{number}.main", task, **common, rewards=rewards, metrics={"tool_calls": 2}),
            played(f"e{number}.helper", task, **common, agent="helper/0", rewards=[(None, "help", 0.5)]),
            played(
                f"e{number}.judge", task, **common, agent="judge", policy="a", frozen=True, rewards=[(None, "no", 9.0)]
            ),
        ]  # fmt: skip
    trajectories[3].error = "InferenceError: gone"
    # A further attempt at the same episode is an episode.
    trajectories.append(replace(trajectories[3], error=None, attempt=1))
    return trajectories


@pytest.mark.parametrize("role", [None, "helper"])
def test_figures_are_those_of_an_evaluation_s_summary(tmp_path: Path, role: str | None) -> None:
    recorded = several_sessions()
    facts, rows = rows_of(tmp_path, recorded, role=role, success_reward=0.75)
    episodes = episodes_of(rows, facts)
    figures = part_figures(episodes)["sampled"]
    groups = [
        TrajectoryGroup(
            task, task, [trajectory for trajectory in recorded if trajectory.task_id == task], partition="val"
        )
        for task in "abc"
    ]
    expected = summarize(groups, success_reward=0.75, role=role)
    assert figures["reward"] == pytest.approx([expected.reward.mean, expected.reward.stderr])
    assert figures["success"] == pytest.approx([expected.success.mean, expected.success.stderr])
    assert figures["turns"] == pytest.approx(expected.turns)
    assert figures["tokens"] == pytest.approx(expected.sampled_tokens)
    assert figures["failed"] == expected.failed == 1
    columns = task_columns(episodes, 10)
    assert columns["task"] == ["a", "b", "c"]
    counted = Counter(episode.task for episode in episodes if episode.error is None)
    assert columns["episodes"] == [counted[task] for task in "abc"]
    weighed = sum(mean * count for mean, count in zip(columns["reward"], columns["episodes"], strict=True))
    assert weighed / sum(columns["episodes"]) == pytest.approx(expected.reward.mean)


def test_parts_are_tags_of_held_out_groups(tmp_path: Path) -> None:
    val = {"partition": "val"}
    recorded = [
        played("a", group_id="0-train-t-e0"), played("b", group_id="0-val-t-e0~step-4-greedy", **val),
        played("c", group_id="g", **val), played("d", group_id="0-train-t-e1~x"),
    ]  # fmt: skip
    _, rows = rows_of(tmp_path, recorded)
    assert [row.part for row in rows] == ["train", "step-4-greedy", "val", "train"]


def test_errors_are_counted_by_their_text(tmp_path: Path) -> None:
    recorded = [
        played("a", error="X: 1"),
        played("b"),
        played("c", error="Y: " + "y" * 1000),
        played("d", error="X: 1"),
    ]
    _, rows = rows_of(tmp_path, recorded)
    first, second = error_counts(rows)
    assert first == ("X: 1", 2, "d")
    assert second[0] == "Y: " + "y" * 397 + "..."


@given(lengths=st.lists(st.integers(1, 60), max_size=30), room=st.integers(0, 800))
def test_fit_into_keeps_the_beginning_within_the_room(lengths: list[int], room: int) -> None:
    values = [f"{number}{'abcdefghij'[number % 10] * length}" for number, length in enumerate(lengths)]
    text, number = fit_into(lambda limit: values[:limit], len(values), room)
    assert unpack(text) == values[:number]
    assert len(text) <= room or number == 0
    if len(pack(values)) <= room:
        assert number == len(values)


def test_chunks_hold_whole_groups_and_stop_where_the_room_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.ext.report.trajectories.CHUNK_BYTES", 4000)
    facts, rows = rows_of(tmp_path, [row for number in range(30) for row in group(f"t{number}", 0)])
    contents = Contents()
    packed = list(chunks(facts, by_priority(rows), 3000, contents))
    assert sum(map(len, packed)) == contents.size <= 3000
    assert len(packed) == contents.chunks > 1
    slots = {row.id: row.slot for row in rows if row.slot is not None}
    assert contents.trajectories == len(slots)
    assert {name: unpack(packed[chunk])[index]["id"] for name, (chunk, index) in slots.items()} == {
        name: name for name in slots
    }
    of_group = Counter(row.group for row in rows if row.slot is not None)
    assert set(of_group.values()) == {2}
    assert contents.token_ids == {1, 2, 3, 4}


def test_huge_trajectory_does_not_displace_small_trajectories(tmp_path: Path) -> None:
    huge = played("huge", "huge", "".join(map(chr, range(0x4E00, 0x9000))))
    facts, rows = rows_of(tmp_path, [huge, *(played(f"e{number}", "t") for number in range(3))])
    contents = Contents()
    list(chunks(facts, [[row] for row in rows], 8000, contents))
    assert [row.slot is not None for row in rows] == [False, True, True, True]


def test_a_large_trajectory_is_kept_without_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.ext.report.trajectories.LARGEST", 1500)
    run = write_run(tmp_path / "a", [played("e0"), played("e1", answer="x" * 1000)])
    written = write_report([run], tmp_path / "out.html")
    page = Page(tmp_path / "out.html")
    assert "token_ids" in page.record("e0")["segments"][1]
    segment = page.record("e1")["segments"][1]
    assert segment.keys() & {"token_ids", "logprobs"} == set()
    assert segment["tokens"] == 2
    assert "a: 1 large trajectories are shown without their tokens" in written.notes


def test_a_record_has_tokens_with_their_figures(tmp_path: Path) -> None:
    facts = RunFacts("a", "training", gaps={"e0": [(1, 0, -0.25, -0.5, 7)]})
    record = trajectory_record(played("e0", seed=2**63 + 1), facts)
    assert record["seed"] == str(2**63 + 1)
    segment = record["segments"][1]
    assert (segment["token_ids"].tolist(), segment["logprobs"].tolist()) == ([3, 4], [-0.25, -1.5])
    assert (segment["weight_versions"], segment["tokens"]) == (((5, 0, 2),), 2)
    assert list(record["gaps"]) == [(1, 0, -0.25, -0.5, 7)]


def test_numbers_that_a_browser_would_round_and_half_characters_become_texts(tmp_path: Path) -> None:
    arguments = {"large": 2**53 + 1, "huge": [10**30], "exact": 2**53 - 1, "flag": True, "half": "\ud83d!"}
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    recorded = played("e0")
    recorded.segments[1].messages[0]["tool_calls"] = [call]
    write_report([write_run(tmp_path / "a", [recorded])], tmp_path / "out.html")
    [message] = Page(tmp_path / "out.html").record("e0")["segments"][1]["messages"]
    assert message["tool_calls"][0]["function"]["arguments"] == {
        "large": str(2**53 + 1), "huge": [str(10**30)], "exact": 2**53 - 1, "flag": True, "half": "\\ud83d!",
    }  # fmt: skip


def test_offsets_point_to_records_and_torn_records_are_skipped(tmp_path: Path) -> None:
    file = write_run(tmp_path / "a", [played("e0"), played("e1")]) / "trajectories.twz"
    first, second = record_bytes(file)
    file.write_bytes(first + second + first[:50])
    located = [(location.offset, trajectory.id) for location, trajectory in located_trajectories(file)]
    assert located == [(0, "e0"), (len(first), "e1")]
    assert write_report([file], tmp_path / "out.html").readable == 2
    assert Page(tmp_path / "out.html").record("e1")["id"] == "e1"
