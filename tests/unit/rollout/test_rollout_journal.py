"""The journal: what a process finished is there for the next one, whatever cut the first one off."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from support.rollout.record_files import spoil
from turnwise.errors import FormatError, TrainError
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.journal.state import read_journal, seal, unseal
from turnwise.rollout.journal.summary import summarize_journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.group_store import group_facts
from turnwise.tasks import Task
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.trajectory_file import read_trajectories


def member(group: str, number: int, part: int = 0) -> Trajectory:
    segment = Segment(0, -1, "context", np.arange(3, dtype=np.int32), messages=({"role": "user", "content": "hi"},))
    name = f"{part}-{group}/{number}.0"
    return Trajectory(name, name, f"0-{group}", group, segments=[segment], rewards=[(None, "score", float(number))])


def whole(group: str, members: list[Trajectory]) -> TrajectoryGroup:
    return TrajectoryGroup(f"0-{group}", group, members)


def finish(journal: Journal, group: str, numbers: range, *, put: bool = True) -> None:
    members = [member(group, number) for number in numbers]
    for number, trajectory in zip(numbers, members, strict=True):
        journal.write(trajectory)
        journal.member(group, f"0-{group}", number, [trajectory])
    if put:
        journal.group(whole(group, members), group_facts(whole(group, members), group, 0))


def test_unseal_detects_any_changed_byte() -> None:
    line = seal({"event": "take", "step": 3, "keys": ['a,"crc":1}']})
    assert unseal(line) == {"event": "take", "step": 3, "keys": ['a,"crc":1}']}
    for position in range(len(line)):
        assert unseal(line[:position]) is None
        assert unseal(line[:position] + bytes([line[position] ^ 1]) + line[position + 1 :]) is None


def test_a_resumed_process_restores_untrained_groups(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for name in ("a", "b", "c"):
        finish(journal, name, range(2))
    finish(journal, "d", range(1), put=False)
    journal.take(1, ["a"])
    journal.take(2, ["b"])
    journal.drop(2, "c", "stale")
    # Killed: nothing is closed. The next process goes on from step 1.
    later = Journal.open(tmp_path, part=1, after_step=1)
    assert later.restore("a") is None
    assert [key for key in "abcd" if later.facts(key, 0) is not None] == ["b", "c"]
    restored = later.restore("d")
    assert restored is not None
    assert (restored.group_id, restored.complete, list(restored.members)) == ("0-d", False, [0])
    assert restored.members[0][0].to_bytes() == member("d", 0).to_bytes()
    facts = later.facts("b", 7)
    assert facts == replace(group_facts(whole("b", [member("b", n) for n in range(2)]), "b", 7))
    assert [trajectory.id for trajectory in later.load("b").trajectories] == ["0-b/0.0", "0-b/1.0"]
    later.take(2, ["b"])
    later.close()
    assert read_journal(tmp_path / "journal.jsonl").events[-1][1]["event"] == "end"
    # What a later checkpoint counts as trained stays trained.
    assert Journal.open(tmp_path, part=2, after_step=2).restore("b") is None


def test_groups_given_back_are_available_to_the_next_process(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for name in ("a", "b", "c"):
        finish(journal, name, range(2))
    journal.take(1, ["a"])
    journal.take(1, ["b"])
    assert (journal.given_to, journal.given) == (1, ["a", "b"])
    journal.take(1, ["b"], back=True)
    journal.close()
    later = Journal.open(tmp_path, part=1, after_step=1)
    assert [key for key in "abc" if later.facts(key, 0) is not None] == ["b", "c"]
    later.take(2, ["b"])
    assert (later.given_to, later.given) == (2, ["b"])
    later.close()
    assert Journal.open(tmp_path, part=2, after_step=2).restore("b") is None


STEPS = 3
GROUPS = 4


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process: each step is given the group before the last."""
    directory = tmp_path_factory.mktemp("history")
    journal = Journal.open(directory)
    for number in range(GROUPS):
        finish(journal, f"g{number}", range(2))
        if number:
            journal.take(number, [f"g{number - 1}"])
    journal.close()
    return directory


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_cut_leaves_a_journal_that_loses_nothing_and_trains_nothing_twice(
    history: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = (history / "journal.jsonl").read_bytes()
    cut = data.draw(st.integers(0, len(lines)))
    garbage = data.draw(st.binary(max_size=20))
    after_step = data.draw(st.integers(0, STEPS))
    directory = tmp_path_factory.mktemp("cut")
    (directory / "journal.jsonl").write_bytes(lines[:cut] + garbage)
    (directory / "trajectories.twz").write_bytes((history / "trajectories.twz").read_bytes())
    events_on_disk = [event for _, event in read_journal(directory / "journal.jsonl").events]
    taken_keys = {
        key
        for event in events_on_disk
        if event["event"] == "take" and event["step"] <= after_step
        for key in event["keys"]
    }
    put = {event["key"] for event in events_on_disk if event["event"] == "group"}
    finished = {(event["key"], event["member"]) for event in events_on_disk if event["event"] == "member"}
    notices: list[str] = []
    journal = Journal.open(directory, part=1, after_step=after_step, say=notices.append)
    assert len(notices) == (bool(events_on_disk) and events_on_disk[-1]["event"] != "end")
    assert all("process 0 of the run did not end in order: it was killed" in notice for notice in notices)
    for number in range(GROUPS):
        key = f"g{number}"
        restored = journal.restore(key)
        if key in taken_keys:
            assert restored is None
            continue
        assert {(key, member) for member in (restored.members if restored else ())} == {
            e for e in finished if e[0] == key
        }
        assert (journal.facts(key, 0) is not None) == (key in put)
    journal.close()
    # It is whole again: another process reads it, without a word.
    notices.clear()
    Journal.open(directory, part=2, after_step=after_step, say=notices.append).close()
    assert notices == []


def test_damage_before_intact_lines_raises_format_error(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for name in ("a", "b"):
        finish(journal, name, range(2))
    file = tmp_path / "journal.jsonl"
    intact = file.read_bytes()
    file.write_bytes(intact.replace(b'"member":1', b'"member":7', 1))
    with pytest.raises(FormatError, match=r"journal\.jsonl:3: .*checksum differs.*restore the file from a copy"):
        Journal.open(tmp_path, part=1)
    file.write_bytes(intact)
    payloads = tmp_path / "trajectories.twz"
    spoil(payloads, 0)
    with pytest.raises(FormatError, match=r"trajectories\.twz: trajectory 0-a/0\.0 at byte 0 is corrupt"):
        Journal.open(tmp_path, part=1)


def test_trajectories_that_a_power_cut_took_are_rolled_out_again(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for name in ("a", "b"):
        finish(journal, name, range(2))
    payloads = tmp_path / "trajectories.twz"
    payloads.write_bytes(payloads.read_bytes()[:-5] + b"\0\0\0\0\0")
    notices: list[str] = []
    later = Journal.open(tmp_path, part=1, say=notices.append)
    assert any("1 finished trajectories are incomplete on disk" in text for text in notices)
    assert later.facts("a", 0) is not None
    restored = later.restore("b")
    assert restored is not None
    assert (restored.complete, list(restored.members)) == (False, [0])
    assert len(list(read_trajectories(payloads))) == 3


def test_a_trajectory_that_was_not_noted_before_a_kill_is_told(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    finish(journal, "a", range(1), put=False)
    journal.write(member("a", 1))
    failed = member("a", 2)
    failed.error = "EnvError: gone"
    journal.write(failed)
    for part in (1, 2):
        restored = Journal.open(tmp_path, part=part).restore("a")
        assert restored is not None
        assert list(restored.members) == [0]
    orphans = [e for _, e in read_journal(tmp_path / "journal.jsonl").events if e["event"] == "orphan"]
    assert [event["trajectory"] for event in orphans] == ["0-a/1.0"]


def test_members_wait_aside_for_their_group_reward_and_stand_once_in_the_end(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    members = [member("a", number) for number in range(2)]
    for number, trajectory in enumerate(members):
        journal.member("a", "0-a", number, [trajectory], pending=True)
    # The group was rewarded and written; the process was killed before the journal said so.
    journal.write(members[0])
    later = Journal.open(tmp_path, part=1)
    restored = later.restore("a")
    assert restored is not None
    assert sorted(restored.members) == [0, 1]
    assert list(read_trajectories(tmp_path / "trajectories.twz")) == []
    rewarded = [trajectory for member in restored.members.values() for trajectory in member]
    for trajectory in rewarded:
        later.write(trajectory)
    later.group(whole("a", rewarded), group_facts(whole("a", rewarded), "a", 0))
    asyncio.run(later.sync())
    assert (tmp_path / "pending.twz").stat().st_size == 0
    assert [trajectory.id for trajectory in read_trajectories(tmp_path / "trajectories.twz")] == [
        trajectory.id for trajectory in members
    ]
    assert Journal.open(tmp_path, part=2).facts("a", 0) is not None


@pytest.mark.parametrize("name", ["journal.jsonl", "trajectories.twz"])
def test_a_full_disk_is_one_error_and_leaves_complete_lines(tmp_path: Path, name: str) -> None:
    journal = Journal.open(tmp_path)
    finish(journal, "a", range(1))
    content_before = (tmp_path / name).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for the beginning of the next line, and no more.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content_before) + 10, limits[1]))
    try:
        with pytest.raises(TrainError, match=rf"{name} cannot be written: File too large: make room .* give the same"):
            journal.take(1, ["a"]) if name == "journal.jsonl" else journal.write(member("a", 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / name).read_bytes() == content_before
    later = Journal.open(tmp_path, part=1)
    assert later.facts("a", 0) is not None


async def test_groups_above_memory_mb_are_read_from_disk(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    buffer = LocalReplayBuffer(journal=journal, memory_mb=1)
    text = "x" * 300_000
    for number in range(8):
        trajectory = member(f"g{number}", 0)
        trajectory.segments = [replace(trajectory.segments[0], messages=({"role": "user", "content": text},))]
        assert not buffer.expect(RolloutRequest(Task(f"g{number}", "go")), 0)
        await buffer.put(whole(f"g{number}", [trajectory]))
        assert buffer._store.cached_bytes <= 2**20
    ref, _ = await buffer.sample(1, "train", 8)
    assert [group.id for group in await buffer.fetch(ref)] == [f"0-g{number}" for number in range(8)]
    await buffer.release(ref)
    assert buffer._store.cached_bytes == 0
    assert journal._state.entries == {}, "what was trained is on disk only"
    # A process that goes on from before the step finds all of them, one after it none.
    resumed = LocalReplayBuffer(journal=Journal.open(tmp_path, part=1, after_step=0))
    requests = [RolloutRequest(Task(f"g{number}", "go")) for number in range(8)]
    assert all(resumed.expect(request, 0) for request in requests)
    ref, _ = await resumed.sample(1, "train", 8)
    assert len(await resumed.fetch(ref)) == 8
    never = LocalReplayBuffer(journal=Journal.open(tmp_path, part=2, after_step=1))
    assert not any(never.expect(request, 0) for request in requests)


def test_unclaimed_trajectories_of_a_manager_are_noted_at_the_end(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    finish(journal, "a", range(1))
    journal.write(member("b", 0))
    journal.unclaimed |= {"0-a/0.0", "0-b/0.0", "written-by-nobody"}
    journal.close()
    events = [event for _, event in read_journal(tmp_path / "journal.jsonl").events]
    assert [event["ids"] for event in events if event["event"] == "late"] == [["0-b/0.0"]]
    summary = summarize_journal(tmp_path / "journal.jsonl")
    names = ["0-a/0.0", "0-b/0.0"]
    assert summary.unreferenced(names, tmp_path / "trajectories.twz") == []
    # Read as every journal is by the next process.
    Journal.open(tmp_path, part=1).close()
