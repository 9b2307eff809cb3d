"""Clients that converse over their standard input and output, in separate network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support.agents.isolated_programs import start_isolated

LIMIT_S = 60.0
"""Seconds that an answer may take."""


@dataclass
class TalkingProgram:
    """A program that is running, in whose namespace a service can be reached.

    Attributes:
        process: Its process.
        lines: What it has written, parsed.
    """

    process: asyncio.subprocess.Process
    lines: list[dict[str, Any]]

    async def say(self, message: str, is_answer: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Write a line; return the first line of its answer that is one. Raises AssertionError if the program ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(message.encode() + b"\n")
        while True:
            line = await asyncio.wait_for(self.process.stdout.readline(), LIMIT_S)
            assert line, (await self.end(), self.lines)
            record: dict[str, Any] = json.loads(line)
            self.lines.append(record)
            if is_answer(record):
                return record

    async def end(self) -> tuple[int | None, str]:
        """Close its input; return its exit status and what it wrote about errors."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        _, errors = await asyncio.wait_for(self.process.communicate(), LIMIT_S)
        return self.process.returncode, errors.decode()


@contextlib.asynccontextmanager
async def talking(
    argv: Callable[[str], Sequence[str]], env: Callable[[str], Mapping[str, str]], url: str, work: Path
) -> AsyncIterator[TalkingProgram]:
    """Run a program in the context; ``argv`` and ``env`` are functions of the URL by which it reaches the service.

    Args:
        argv: Its command line.
        env: Its environment, besides PATH and HOME.
        url: The service.
        work: An empty folder for it.
    """
    home = work / "home"
    home.mkdir(parents=True)
    process, control, listener = await start_isolated(asyncio.subprocess.PIPE)
    parts = urlsplit(url)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served, serving = await asyncio.open_connection(parts.hostname, parts.port)
        await asyncio.gather(copy(reader, serving), copy(served, writer))

    server = await asyncio.start_server(connect, sock=listener)
    base = f"http://127.0.0.1:{listener.getsockname()[1]}{parts.path}"
    settings = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "NO_COLOR": "1", **env(base)}
    control.sendall(json.dumps({"argv": list(argv(base)), "cwd": str(work), "env": settings}).encode() + b"\n")
    try:
        yield TalkingProgram(process, [])
    finally:
        with contextlib.suppress(ProcessLookupError):
            # The group of what this function started, which leads its process session.
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        server.close()
        control.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until either end closes."""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(2**16):
            writer.write(piece)
            await writer.drain()
    writer.close()
