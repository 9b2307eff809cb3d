"""DockerProcess: a spawned command of a container."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from turnwise.errors import SandboxDied
from turnwise.sandboxes.core import MAX_OUTPUT, SandboxProcess
from turnwise.sandboxes.docker.commands import Commands, RunningCommand

_MIN_POLL: Final = 0.02
_MAX_POLL: Final = 0.5


class DockerProcess(SandboxProcess):
    """A spawned command and its connection; ``first`` is output that arrived with its start."""

    def __init__(self, commands: Commands, running: RunningCommand, first: bytes) -> None:
        assert running.stream is not None
        self._commands = commands
        self._running = running
        self._stream = running.stream
        self._output = bytearray(first)
        self._input_open = True
        self._code: int | None = None

    async def write(self, data: bytes) -> None:
        """Write to its input."""
        if not self._input_open or self._stream.ended or self._code is not None:
            raise BrokenPipeError("the command has ended, or its input is closed")
        try:
            await self._stream.write(data)
        except OSError as error:
            raise BrokenPipeError("the command has ended") from error

    async def read(self, max_bytes: int = MAX_OUTPUT) -> bytes:
        """Return output as soon as there is any."""
        if not self._output:
            for _, piece in await self._stream.pieces():
                self._output += piece
        output = bytes(self._output[:max_bytes])
        del self._output[:max_bytes]
        return output

    async def close_stdin(self) -> None:
        """Close its input."""
        if self._input_open:
            self._input_open = False
            self._stream.end_input()

    async def interrupt(self) -> None:
        """Send SIGINT to its process group."""
        if self._code is None:
            await self._commands.interrupt(self._running)

    async def kill(self) -> None:
        """Kill it with all its processes."""
        with contextlib.suppress(OSError, SandboxDied):
            await self._commands.end(self._running)

    async def wait(self) -> int:
        """Wait for its end by polling the engine, since its streams may stay open longer."""
        pause = _MIN_POLL
        while self._code is None:
            self._code = await self._commands.exit_code(self._running)
            if self._code is None:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _MAX_POLL)
        return self._code

    def disconnect(self) -> None:
        """Close the connection."""
        self._stream.close()
