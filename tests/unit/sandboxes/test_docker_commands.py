"""How the end of a command in a container is recognised. A fake stands for the engine."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from turnwise.sandboxes.docker.commands import Commands
from turnwise.sandboxes.docker.streams import STDERR, STDOUT, Output, Stream


class Engine:
    """An engine whose commands write nothing until their state is inspected."""

    def __init__(self, output: Callable[[bytes], bytes]) -> None:
        self.ours, self.theirs = socket.socketpair()
        self._output = output
        self._inspected = False

    async def run(self, *_: Any, **__: Any) -> tuple[str, Stream]:
        return "id", await Stream.open(self.ours, b"", lambda: None)

    async def call(self, request: Callable[[Any], Any], *_: Any, **__: Any) -> Any:
        return request(self)

    def exec_inspect(self, _: str) -> dict[str, Any]:
        if not self._inspected:
            self._inspected = True
            self.theirs.sendall(self._output(self.theirs.recv(100, socket.MSG_DONTWAIT).strip()))
        return {"Running": False, "ExitCode": 137}

    def inspect_container(self, _: str) -> dict[str, Any]:
        return {"State": {"Running": True}}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.sandboxes.docker.commands._QUIET_S", 0.02)
    monkeypatch.setattr("turnwise.sandboxes.docker.commands._LAST_OUTPUT_S", 0.2)


def frame(stream: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", stream, len(data)) + data


async def run(engine: Engine) -> tuple[int | None, bytes]:
    fake: Any = engine
    commands, out, err = Commands(fake, "box", "1:1", {}, pids=10, keeps_files=True), Output(), Output()
    with engine.theirs:
        async with asyncio.timeout(10):
            code = await commands.run("ls", "/", out, err, env={}, timeout=None)
    return code, out.data


async def test_output_that_arrives_with_the_inspection_counts() -> None:
    def output(mark: bytes) -> bytes:
        return frame(STDOUT, b"bin\n" + mark + b":0\n") + frame(STDERR, mark + b":0\n")

    assert await run(Engine(output)) == (0, b"bin\n")


async def test_command_without_end_report_gets_the_engines_exit_code() -> None:
    assert await run(Engine(lambda _: frame(STDOUT, b"some"))) == (137, b"some")
