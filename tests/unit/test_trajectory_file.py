"""The file of trajectories: what a kill, a power cut or a lost index leaves is read as what was written."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.rollout.record_files import record_bytes, spoil
from turnwise.errors import FormatError
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import (
    TRAJECTORIES,
    TrajectoryEntry,
    TrajectoryFile,
    TrajectoryWriter,
    index_path,
    located_trajectories,
    read_trajectories,
)

SYSTEM = {"role": "system", "content": "You look things up in a table. " * 20}
TOOLS = ({"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}},)


def trajectory(number: int) -> Trajectory:
    draw = np.random.default_rng(number)
    prompt = np.concatenate([np.arange(1000, 1200), draw.integers(0, 150_000, 20)]).astype(np.int32)
    segments = [
        Segment(0, -1, "context", prompt, (SYSTEM, {"role": "user", "content": f"What is {number}?"}), tools=TOOLS),
        Segment(
            1,
            0,
            "sampled",
            draw.integers(0, 150_000, 30).astype(np.int32),
            ({"role": "assistant", "content": f"It is {2**70 if number == 3 else number}.", "big": 2**70 - number},),
            turn_id="t0",
            logprobs=-draw.random(30, dtype=np.float32),
            weight_versions=((4, 0, 30),),
            finish_reason="stop",
        ),
    ]
    name = f"0-g{number // 4}/{number}"
    error = "EnvError: gone" if number == 5 else None
    group, rewards = f"0-g{number // 4}", [("t0", "exact", number / 8)]
    return Trajectory(name, name, group, f"task-{number // 4}", segments=segments, rewards=rewards, error=error)


def write(path: Path, numbers: range) -> None:
    writer = TrajectoryWriter(path)
    for number in numbers:
        writer.write(trajectory(number))
    writer.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Twenty trajectories: the last five refer to the dictionary that was made of the others."""
    path = tmp_path / TRAJECTORIES
    write(path, range(20))
    return path


def same(trajectories: list[Trajectory], numbers: range) -> None:
    assert [read_back.to_bytes() for read_back in trajectories] == [trajectory(number).to_bytes() for number in numbers]


def entries(path: Path) -> list[TrajectoryEntry]:
    with TrajectoryFile(path) as opened:
        return list(opened.entries)


def test_written_trajectories_are_read_together_or_singly(file: Path) -> None:
    same(list(read_trajectories(file)), range(20))
    with TrajectoryFile(file) as opened:
        assert [entry.id for entry in opened.entries] == [trajectory(number).id for number in range(20)]
        assert opened.read(opened.entries[18]).to_bytes() == trajectory(18).to_bytes()
        [entry] = opened.entries.find("0-g1/5")
        assert (entry.failed, entry.reward, entry.turns, entry.sampled_tokens) == (True, 5 / 8, 1, 30)
        assert opened.at(entry.offset).error == "EnvError: gone"
        with pytest.raises(FormatError, match=r"there is no intact trajectory at byte 1$"):
            opened.at(1)
    first, *_, last_record = record_bytes(file)
    # The system prompt and the tools stand in the dictionary.
    assert len(last_record) < 0.7 * len(first)


def test_file_is_read_while_written_and_continued_by_another_process(file: Path) -> None:
    writer = TrajectoryWriter(file)
    writer.write(trajectory(20))
    same(list(read_trajectories(file)), range(21))
    assert len(entries(file)) == 21
    writer.close()
    write(file, range(21, 24))
    same(list(read_trajectories(file)), range(24))
    # One dictionary serves all processes.
    assert file.read_bytes().count(b"TWZ\x01D") == 1


def test_a_torn_record_is_cut_off_and_no_other_is_lost(file: Path) -> None:
    content = file.read_bytes()
    begins = len(content) - len(record_bytes(file)[-1])
    for cut in (*range(begins + 1, begins + 40), len(content) - 1):
        for tail in (b"", b"\xaa" * 7):
            file.write_bytes(content[:cut] + tail)
            assert len(list(read_trajectories(file))) == 19
            assert len(entries(file)) == 19
    writer = TrajectoryWriter(file)
    assert (writer.size, writer.torn) == (begins, len(content) - 1 + 7 - begins)
    writer.write(trajectory(19))
    writer.close()
    assert file.read_bytes() == content
    same(list(read_trajectories(file)), range(20))
    assert len(entries(file)) == 20


@pytest.mark.parametrize("index_state", ["nothing", "half", "torn", "nonsense", "another file's"])
def test_an_index_that_is_lost_or_late_is_completed(file: Path, index_state: str) -> None:
    index = index_path(file)
    intact, entries_before = index.read_bytes(), entries(file)
    lines = intact.splitlines(keepends=True)
    if index_state == "nothing":
        index.unlink()
    elif index_state == "another file's":
        index.write_bytes(b"".join(line.replace(b"[", b"[1", 1) for line in lines))
    else:
        index.write_bytes({"half": b"".join(lines[:9]), "torn": intact[:-9], "nonsense": b"{}\nx\n"}[index_state])
    assert entries(file) == entries_before
    TrajectoryWriter(file).close()
    assert index.read_bytes() == intact


def test_damage_that_no_kill_explains_is_named(file: Path) -> None:
    locations = [location for location, _ in located_trajectories(file)]
    spoil(file, 7)
    with pytest.raises(
        FormatError, match=rf"the {locations[7].length} bytes at {locations[7].offset} are damaged, and"
    ):
        list(read_trajectories(file))
    with TrajectoryFile(file) as opened, pytest.raises(FormatError, match="not those that were written"):
        opened.read(opened.entries[7])
    # The others are whole, and what is written goes behind them.
    writer = TrajectoryWriter(file)
    assert [writer.holds(location) for location in locations] == [number != 7 for number in range(20)]
    assert len(list(writer.locations(0))) == 19
    writer.close()


def test_a_damaged_dictionary_is_named(file: Path) -> None:
    data = bytearray(file.read_bytes())
    offset = data.index(b"TWZ\x01D")
    data[offset + 60] ^= 1
    file.write_bytes(bytes(data))
    with TrajectoryFile(file) as opened:
        assert opened.read(opened.entries[3]).id == "0-g0/3"
        with pytest.raises(FormatError, match=rf"the dictionary at byte {offset} is damaged"):
            opened.read(opened.entries[19])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": "0"}\n', r"is no file of trajectories: it begins with b'\{\"id'"),
        (b"TWZ\x07T and more", "has version 7 of the layout; this version reads 1"),
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / TRAJECTORIES
    path.write_bytes(content)
    for use in (lambda: list(read_trajectories(path)), lambda: TrajectoryFile(path), lambda: TrajectoryWriter(path)):
        with pytest.raises(FormatError, match=message):
            use()
    assert path.read_bytes() == content


def test_a_void_trajectory_is_in_none_of_the_readers(file: Path) -> None:
    writer = TrajectoryWriter(file)
    locations = list(writer.locations(0))
    writer.invalidate(locations[4])
    writer.invalidate(locations[19])
    assert not writer.holds(locations[4])
    writer.write(trajectory(4))
    writer.close()
    numbers = [*range(4), *range(5, 19), 4]
    assert [row.id for row in read_trajectories(file)] == [trajectory(number).id for number in numbers]
    assert [entry.id for entry in entries(file)] == [trajectory(number).id for number in numbers]


def test_truncated_trajectories_are_gone_and_can_be_rewritten(file: Path) -> None:
    writer = TrajectoryWriter(file)
    # Before the dictionary, too.
    writer.truncate(list(writer.locations(0))[2].offset)
    for number in range(30, 50):
        writer.write(trajectory(number))
    writer.close()
    assert [entry.id for entry in entries(file)] == [trajectory(n).id for n in (0, 1, *range(30, 50))]
    assert [row.id for row in read_trajectories(file)] == [row.id for row in entries(file)]


def test_threads_may_write_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / TRAJECTORIES
    writer = TrajectoryWriter(path)
    parts = [range(first, first + 10) for first in range(0, 40, 10)]
    threads = [threading.Thread(target=lambda part=part: [writer.write(trajectory(n)) for n in part]) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert {row.id for row in read_trajectories(path)} == {trajectory(number).id for number in range(40)}
    assert {entry.id for entry in entries(path)} == {trajectory(number).id for number in range(40)}


def test_unwritable_trajectory_raises_and_writes_nothing(file: Path) -> None:
    content = file.read_bytes()
    writer = TrajectoryWriter(file)
    one = trajectory(0)
    wrong = replace(one.segments[1], logprobs=np.full(30, np.nan, np.float32))
    with pytest.raises(FormatError, match="segment 1 has a logprob that is not finite"):
        writer.write(replace(one, segments=[one.segments[0], wrong]))
    with pytest.raises(FormatError, match="cannot be written as JSON"):
        writer.write(replace(one, metrics={"what": object()}))  # type: ignore[dict-item]
    writer.close()
    assert file.read_bytes() == content
