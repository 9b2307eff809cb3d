"""The frames of a docker engine, how much of an output is kept, and what tells that a command has ended."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from turnwise.sandboxes.docker.scripts import run_command, spawn_command
from turnwise.sandboxes.docker.streams import STDERR, STDOUT, Demux, Output, Stream

MARK = b"0f" * 16


def frame(number: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", number, len(data)) + data


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_taken_apart_however_they_are_cut(seed: int) -> None:
    draw = random.Random(seed)
    sent = [(draw.choice((STDOUT, STDERR)), draw.randbytes(draw.choice((0, 1, 7, 8, 9, 300)))) for _ in range(30)]
    wire = b"".join(frame(*each) for each in sent)
    demux, got = Demux(), {STDOUT: b"", STDERR: b""}
    while wire:
        size = draw.choice((1, 2, 3, 8, 100))
        for number, piece in demux.feed(wire[:size]):
            got[number] += piece
        wire = wire[size:]
    assert got == {kind: b"".join(data for number, data in sent if number == kind) for kind in got}


@pytest.mark.parametrize("seed", range(20))
def test_an_end_is_found_however_it_is_cut_and_what_follows_is_dropped(seed: int) -> None:
    draw = random.Random(seed)
    # Pieces of the word in the output are no end of it.
    said = b"".join(draw.choice((b"a\n", MARK[:5], MARK[:31], MARK + b".", b"\0\xff")) for _ in range(20))
    wire = said + MARK + b":17\n" + b"of what still runs"
    out = Output(MARK, 10_000)
    while wire:
        size = draw.choice((1, 2, 5, 40))
        out.feed(wire[:size])
        wire = wire[size:]
    assert (out.end, out.kept, out.truncated) == ("17", said, False)


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 1000])
def test_of_a_long_output_the_head_and_the_tail_are_kept(limit: int) -> None:
    said = bytes(index % 251 for index in range(300_000))
    out = Output(MARK, limit)
    for begin in range(0, len(said), 7001):
        out.feed(said[begin : begin + 7001])
    out.finish()
    assert out.truncated
    head, tail = limit // 2, limit - limit // 2
    missing = f"\n[{len(said) - limit} bytes are missing here]\n".encode()
    assert out.kept == said[:head] + missing + (said[-tail:] if tail else b"")


def test_an_output_of_just_the_limit_is_not_cut() -> None:
    out = Output(MARK, 11)
    out.feed(b"hello world")
    out.finish()
    assert (out.kept, out.truncated) == (b"hello world", False)


async def test_a_connection_gives_what_came_with_its_beginning_and_ends_when_it_breaks() -> None:
    ours, theirs = socket.socketpair()
    released: list[bool] = []
    stream = Stream(ours, frame(STDOUT, b"early")[:4], lambda: released.append(True))
    theirs.sendall(frame(STDOUT, b"early")[4:])
    assert await stream.pieces() == [(STDOUT, b"early")]
    await stream.write(b"input")
    assert theirs.recv(100) == b"input"
    stream.end_input()
    assert theirs.recv(100) == b""
    theirs.close()
    assert await stream.pieces() == []
    assert stream.ended
    stream.close()
    assert released == [True]


# What runs inside is run here, by each shell that there is.

SHELLS = [shell for shell in (["dash"], ["bash"], ["busybox", "sh"]) if shutil.which(shell[0])]


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
@pytest.mark.parametrize(
    ("command", "stdin", "code", "out", "err"),
    [
        ("echo a; echo b >&2; exit 3", None, "3", b"a\n", b"b\n"),
        (["sh", "-c", "kill -9 $$"], None, "137", b"", b""),
        (["printf", "%s|", "a b", "", "'\"*"], None, "0", b"a b||'\"*|", b""),
        ("cat", b"x\0y\nz", "0", b"x\0y\nz", b""),
        ("cat", None, "0", b"", b""),
        ("(sleep 0.2; echo late) & echo early", None, "0", b"early\n", b""),
    ],
)
def test_a_command_is_run_and_both_outputs_say_its_end(
    shell: list[str], command: str | list[str], stdin: bytes | None, code: str, out: bytes, err: bytes, tmp_path: Path
) -> None:
    argv = [*shell, *run_command(command, str(tmp_path), has_input=stdin is not None)[1:]]
    done = subprocess.run(argv, input=MARK + b"\n" + (stdin or b""), capture_output=True, timeout=30, check=False)
    outputs = Output(MARK), Output(MARK)
    for output, data in zip(outputs, (done.stdout, done.stderr), strict=True):
        output.feed(data)
    assert [(each.end, each.kept) for each in outputs] == [(code, out), (code, err)]
    # Who ends the shells above a command gets no exit code of its choice.
    assert done.returncode == 137


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_what_cannot_be_run_is_told(shell: list[str], tmp_path: Path) -> None:
    def said(argv: list[str], stdin: bytes = b"") -> bytes:
        return subprocess.run([*shell, *argv[1:]], input=stdin, capture_output=True, timeout=30, check=False).stdout

    assert said(run_command("true", "/no/such", has_input=False), MARK + b"\n") == MARK + b":cwd\n"
    assert said(run_command(["no-such-program"], "/", has_input=False), MARK + b"\n") == MARK + b":127\n"
    assert said(spawn_command("true", "/no/such", "word")) == b"word:cwd\n"
    assert said(spawn_command(["no-such-program"], "/", "word")) == b"word:program\n"
    assert said(spawn_command("echo $PWD >&2", str(tmp_path), "word")) == f"word:ok\n{tmp_path}\n".encode()


async def test_who_stops_waiting_for_output_just_as_it_comes_leaves_it_for_the_next() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        stream = Stream(ours, b"", lambda: None)
        reading = asyncio.create_task(stream.pieces())
        await asyncio.sleep(0)
        theirs.sendall(frame(STDOUT, b"said"))
        # The event loop sees both in one round: what came is there, and the waiting is given up.
        asyncio.get_running_loop().call_later(0, reading.cancel)
        with pytest.raises(asyncio.CancelledError):
            await reading
        async with asyncio.timeout(5):
            assert await stream.pieces() == [(STDOUT, b"said")]
        stream.close()


async def test_a_stream_that_is_closed_wakes_who_reads_it_and_then_lets_go() -> None:
    ours, theirs = socket.socketpair()
    released: list[bool] = []
    with theirs:
        stream = Stream(ours, b"", lambda: released.append(True))
        reading = asyncio.create_task(stream.pieces())
        await asyncio.sleep(0)
        stream.close()
        # Its number would be another's by now, and the event loop would still wait for it.
        assert (ours.fileno() >= 0, released) == (True, [])
        async with asyncio.timeout(5):
            assert await reading == []
        assert (ours.fileno() >= 0, released) == (False, [True])
