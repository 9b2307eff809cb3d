"""The account of a journal: what became of each finished trajectory, and what was trained without being given."""

from __future__ import annotations

from pathlib import Path

from turnwise.rollout.audit import audit_files
from turnwise.rollout.journal.state import SCHEMA_VERSION, seal
from turnwise.rollout.journal.summary import summarize_journal
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TrajectoryWriter


def test_steps_that_a_kill_undid_give_their_groups_back(tmp_path: Path) -> None:
    def group(key: str, *names: str) -> dict:
        return {"event": "group", "key": key, "trajectories": [[name, 0, 1, 2] for name in names], "baselines": []}

    events = [
        {"event": "start", "part": 0, "after_step": 0, "schema_version": SCHEMA_VERSION},
        {"event": "member", "key": "c", "trajectories": [["c1", 0, 1, 2]]},
        group("a", "a1", "a2"), group("b", "b1"), group("d", "d1"), group("e", "e1"),
        {"event": "take", "step": 1, "keys": ["a"]},
        {"event": "take", "step": 2, "keys": ["b"]},
        {"event": "drop", "step": 2, "key": "d", "why": "stale"},
        {"event": "take", "step": 1, "keys": ["e"]},
        {"event": "back", "step": 1, "keys": ["e", "unknown"]},
        {"event": "start", "part": 1, "after_step": 1, "schema_version": SCHEMA_VERSION},
        {"event": "orphan", "trajectory": "o1"},
        {"event": "drop", "step": 2, "key": "d", "why": "equal"},
    ]  # fmt: skip
    file = tmp_path / "journal.jsonl"
    file.write_bytes(b"".join(seal(event) + b"\n" for event in events))
    summary = summarize_journal(file)
    assert summary.fates(["a1", "a2", "b1", "c1", "d1", "e1", "o1", "x"]) == {
        "finished trajectories given to a step": 2, "finished trajectories that wait": 3,
        "finished trajectories dropped": 1, "finished trajectories that a kill cut off": 1, "finished, in no group": 1,
    }  # fmt: skip
    assert summary.misused([("a1", 1), ("a1", 1), ("x", 4)]) == []
    assert summary.begins_after == 0
    assert summary.misused([("e1", 1)]) == ["trajectory e1: trained in step 1, but the journal gave its group to none"]
    assert summary.misused([("b1", 2)]) == ["trajectory b1: trained in step 2, but the journal gave its group to none"]


def test_journal_that_was_emptied_begins_after_a_step(tmp_path: Path) -> None:
    starts = [
        {"event": "start", "part": part, "after_step": part, "schema_version": SCHEMA_VERSION, "payload": 0}
        for part in (2, 3)
    ]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(seal(event) + b"\n" for event in starts))
    assert summarize_journal(tmp_path / "journal.jsonl").begins_after == 2
    for name in ("ledger.jsonl", "trajectories.twz"):
        (tmp_path / name).touch()
    (tmp_path / "run.json").write_text("{}")
    assert audit_files(tmp_path).contradictions == [
        f"{tmp_path}/journal.jsonl begins after step 2: restore it from a copy; earlier steps cannot be checked",
        f"{tmp_path}/batches.jsonl is missing: restore it from a copy; what was trained cannot be checked without it",
    ]


def written(file: Path, names: list[str]) -> list[int]:
    """Write trajectories; return the offset of each, and the size of the file."""
    writer = TrajectoryWriter(file)
    offsets = [writer.write(Trajectory(name, "e", "g", "t")).offset for name in names]
    writer.close()
    return [*offsets, writer.size]


def test_every_finished_trajectory_is_in_a_group_or_was_cut_off(tmp_path: Path) -> None:
    """The trajectories stand in the file one after the other."""
    names = ["old", "a01", "o01", "c01", "x01", "b01", "y01"]
    at = written(tmp_path / "trajectories.twz", names)
    start = {"event": "start", "after_step": 0, "schema_version": SCHEMA_VERSION}
    events = [
        {**start, "part": 0, "payload": at[1]},
        {"event": "member", "key": "a", "trajectories": [["a01", at[1], 13, 2]]},
        {"event": "orphan", "trajectory": "o01"},
        {**start, "part": 1, "payload": at[3]},
        {"event": "late", "ids": ["c01"]},
        {"event": "end"},
        {**start, "part": 2, "payload": at[5]},
        {"event": "member", "key": "b", "trajectories": [["b01", at[5], 13, 2]]},
    ]
    file = tmp_path / "journal.jsonl"

    def unreferenced(*also: dict) -> list[str]:
        file.write_bytes(b"".join(seal(event) + b"\n" for event in (*events, *also)))
        return [text.split()[1] for text in summarize_journal(file).unreferenced(names, tmp_path / "trajectories.twz")]

    # What stood there before the journal began is none of its business, nor what a process left that still runs.
    assert unreferenced() == ["x01:"]
    assert unreferenced({"event": "end"}) == ["x01:", "y01:"]
    assert unreferenced({**start, "part": 3, "payload": at[7]}) == ["x01:", "y01:"]
    assert unreferenced({"event": "orphan", "trajectory": "y01"}, {**start, "part": 3, "payload": at[7]}) == ["x01:"]
    assert summarize_journal(file).fates(["c01", "y01", "x01"]) == {
        "finished trajectories that came too late": 1, "finished trajectories that a kill cut off": 1,
        "finished, in no group": 1,
    }  # fmt: skip


def test_the_journal_summary_finds_each_contradiction(tmp_path: Path) -> None:
    """One run with each contradiction that the journal's account can tell, beside what is sound."""
    names = ["good", "once", "twic", "lost"]
    written(tmp_path / "trajectories.twz", names)
    file = tmp_path / "journal.jsonl"
    events = [
        {"event": "start", "part": 0, "after_step": 0, "payload": 0, "schema_version": SCHEMA_VERSION},
        *(
            {"event": "group", "key": f"k-{name}", "trajectories": [[name, 0, 1, 2]], "baselines": []}
            for name in names[:3]
        ),
        {"event": "take", "step": 1, "keys": ["k-good", "k-twic"]},
        {"event": "drop", "step": 1, "key": "k-once", "why": "stale"},
        {"event": "take", "step": 2, "keys": ["k-twic"]},
        {"event": "end"},
    ]
    file.write_bytes(b"".join(seal(event) + b"\n" for event in events))
    summary = summarize_journal(file)
    assert summary.misused([("good", 1), ("once", 2), ("twic", 1), ("twic", 2)]) == [
        "trajectory once: trained in step 2, but the journal gave its group to none",
        "trajectory twic: was trained in more than one step: 1, 2",
    ]
    assert summary.unreferenced(names, tmp_path / "trajectories.twz") == [
        "trajectory lost: finished, but the journal has it in no group, and no kill explains that"
    ]
    # What a step was given counts as given, whatever follows.
    drop_event = {"event": "drop", "step": 2, "key": "k-good", "why": "stale"}
    file.write_bytes(file.read_bytes() + seal(drop_event) + b"\n")
    assert summarize_journal(file).fates(["good"]) == {"finished trajectories given to a step": 1}
