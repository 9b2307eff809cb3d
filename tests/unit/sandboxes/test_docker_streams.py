"""Frames of a docker engine, output limits, end markers, and the scripts that run commands."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from turnwise.sandboxes.core import MAX_OUTPUT
from turnwise.sandboxes.docker.commands import first_lines
from turnwise.sandboxes.docker.scripts import run_command, spawn_command
from turnwise.sandboxes.docker.streams import STDERR, STDOUT, Demux, Output, Stream

MARK = b"0f" * 16


def frame(number: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", number, len(data)) + data


def output(limit: int = MAX_OUTPUT) -> Output:
    out = Output(limit)
    out.mark = MARK
    return out


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_demultiplexed_at_any_chunk_size(seed: int) -> None:
    draw = random.Random(seed)
    sent = [(draw.choice((STDOUT, STDERR)), draw.randbytes(draw.choice((0, 1, 7, 8, 9, 300)))) for _ in range(30)]
    wire = b"".join(frame(*row) for row in sent)
    demux, received = Demux(), {STDOUT: b"", STDERR: b""}
    while wire:
        size = draw.choice((1, 2, 3, 8, 100))
        for number, piece in demux.feed(wire[:size]):
            received[number] += piece
        wire = wire[size:]
    assert received == {kind: b"".join(data for number, data in sent if number == kind) for kind in received}


@pytest.mark.parametrize("seed", range(20))
def test_end_marker_is_recognised_at_any_chunk_size(seed: int) -> None:
    draw = random.Random(seed)
    # Parts of the marker in the output are no end.
    text = b"".join(draw.choice((b"a\n", MARK[:5], MARK[:31], MARK + b".", b"\0\xff")) for _ in range(20))
    wire = text + MARK + b":17\n" + b"of a background process"
    out = output(10_000)
    while wire:
        size = draw.choice((1, 2, 5, 40))
        out.feed(wire[:size])
        wire = wire[size:]
    assert (out.end, out.data, out.truncated) == ("17", text, False)


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 1000])
def test_long_output_keeps_head_and_tail(limit: int) -> None:
    text = bytes(index % 251 for index in range(300_000))
    out = output(limit)
    for begin in range(0, len(text), 7001):
        out.feed(text[begin : begin + 7001])
    out.finish()
    assert out.truncated
    head, tail = limit // 2, limit - limit // 2
    missing = f"\n[{len(text) - limit} bytes are missing here]\n".encode()
    assert out.data == text[:head] + missing + (text[-tail:] if tail else b"")


def test_output_of_exactly_the_limit_is_not_cut() -> None:
    out = output(11)
    out.feed(b"hello world")
    out.finish()
    assert (out.data, out.truncated) == (b"hello world", False)


async def test_stream_returns_buffered_bytes_and_ends_with_the_connection() -> None:
    ours, theirs = socket.socketpair()
    released: list[bool] = []
    stream = await Stream.open(ours, frame(STDOUT, b"early")[:4], lambda: released.append(True))
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
    await asyncio.sleep(0.01)
    assert (ours.fileno(), released) == (-1, [True])


# The scripts for containers, run here by every installed shell.

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
def test_run_script_reports_the_exit_code_on_both_streams(
    shell: list[str], command: str | list[str], stdin: bytes | None, code: str, out: bytes, err: bytes, tmp_path: Path
) -> None:
    argv = [*shell, *run_command(command, str(tmp_path), has_input=stdin is not None)[1:]]
    done = subprocess.run(argv, input=MARK + b"\n" + (stdin or b""), capture_output=True, timeout=30, check=False)
    outputs = output(), output()
    for stream, data in zip(outputs, (done.stdout, done.stderr), strict=True):
        stream.feed(data)
    assert [(stream.end, stream.data) for stream in outputs] == [(code, out), (code, err)]
    # A command that kills the shells above it cannot choose its exit code.
    assert done.returncode == 137


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_scripts_report_missing_folders_and_programs(shell: list[str], tmp_path: Path) -> None:
    def output_of(argv: list[str], stdin: bytes = b"") -> bytes:
        return subprocess.run([*shell, *argv[1:]], input=stdin, capture_output=True, timeout=30, check=False).stdout

    assert output_of(run_command("true", "/no/such", has_input=False), MARK + b"\n") == MARK + b":cwd\n"
    assert output_of(run_command(["no-such-program"], "/", has_input=False), MARK + b"\n") == MARK + b":127\n"
    assert output_of(spawn_command("true", "/no/such"), b"word\n") == b"word:cwd\n"
    assert output_of(spawn_command(["no-such-program"], "/"), b"word\n") == b"word:program\n"
    spawned = output_of(spawn_command("echo $PWD >&2; cat", str(tmp_path)), b"word\n\ngo\ninput")
    assert spawned == f"word:ok\nword:ok\n{tmp_path}\ninput".encode()


async def test_spawned_shell_is_asked_again_where_the_engine_holds_its_first_line_back() -> None:
    ours, theirs = socket.socketpair()
    stream = await Stream.open(ours, b"", lambda: None)
    reader, writer = await asyncio.open_connection(sock=theirs)
    lines = asyncio.create_task(first_lines(stream, "word"))
    async with asyncio.timeout(30):
        assert [await reader.readline(), await reader.readline()] == [b"word\n", b"\n"]
        writer.write(frame(STDOUT, b"word:ok\nword:ok\n"))
        assert await lines == "word:ok\nword:ok\n"
        assert await reader.readline() == b"go\n"
    writer.close()
    stream.close()


async def test_cancelled_read_loses_no_output() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        stream = await Stream.open(ours, b"", lambda: None)
        reading = asyncio.create_task(stream.pieces())
        await asyncio.sleep(0)
        theirs.sendall(frame(STDOUT, b"said"))
        # The event loop sees data and cancellation in one round.
        asyncio.get_running_loop().call_later(0, reading.cancel)
        with pytest.raises(asyncio.CancelledError):
            await reading
        async with asyncio.timeout(5):
            assert await stream.pieces() == [(STDOUT, b"said")]
        stream.close()


async def test_close_wakes_the_reader_before_releasing_the_socket() -> None:
    ours, theirs = socket.socketpair()
    released: list[bool] = []
    with theirs:
        stream = await Stream.open(ours, b"", lambda: released.append(True))
        reading = asyncio.create_task(stream.pieces())
        await asyncio.sleep(0)
        stream.close()
        async with asyncio.timeout(5):
            assert await reading == []
        await asyncio.sleep(0.01)
        assert (ours.fileno(), released) == (-1, [True])
