"""A spawned command of a local sandbox, and bounded readers of output pipes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Final

from turnwise.errors import SandboxDied
from turnwise.sandboxes.core import MAX_OUTPUT, SandboxProcess
from turnwise.sandboxes.local.channel import Channel, Request
from turnwise.sandboxes.output import HeadTailBuffer

KILL_SECONDS: Final = 30.0
"""Seconds for an agent to kill a tree of processes; a slower agent counts as dead."""


class LocalProcess(SandboxProcess):
    """A spawned command, which owns both pipe ends; ``closed`` is called when they are closed."""

    def __init__(
        self, channel: Channel, request: Request, stdin: int, output: int, closed: Callable[[LocalProcess], None]
    ) -> None:
        self._channel = channel
        self._request = request
        self._stdin = stdin
        self._output = output
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        for fd in (stdin, output):
            os.set_blocking(fd, False)
        request.exit_status.add_done_callback(lambda _: self._close_input())

    async def write(self, data: bytes) -> None:
        """Write to its input."""
        view = memoryview(data)
        while view:
            if self._stdin < 0 or self._request.exit_status.done():
                raise BrokenPipeError("the command has ended, or its input is closed")
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                await self._wait_ready(self._stdin, writing=True)

    async def read(self, max_bytes: int = MAX_OUTPUT) -> bytes:
        """Return output as soon as there is any; empty at the end."""
        while self._output >= 0:
            try:
                data = os.read(self._output, max_bytes)
            except BlockingIOError:
                # Output ends with the command: its background processes may hold the pipe open for ever.
                if self._request.exit_status.done():
                    return b""
                await self._wait_ready(self._output, writing=False)
                continue
            if not data:
                await asyncio.wait([self._request.exit_status])
                self._close_output()
            return data
        return b""

    async def close_stdin(self) -> None:
        """Close its input."""
        self._close_input()

    async def interrupt(self) -> None:
        """Send SIGINT to the command's process group."""
        if not self._request.exit_status.done():
            self._channel.send({"op": "interrupt", "id": self._request.id})

    async def kill(self) -> None:
        """Kill it with all its processes."""
        if not self._channel.dead and not await self._channel.kill(self._request, KILL_SECONDS):
            self._channel.close()
            raise SandboxDied(f"the sandbox did not end a command within {KILL_SECONDS:g} s")

    async def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return exit_code(await asyncio.shield(self._request.exit_status))

    def close(self) -> None:
        """Close its pipes."""
        self._close_input()
        self._close_output()

    async def _wait_ready(self, fd: int, *, writing: bool) -> None:
        """Wait until a pipe is ready, or the command has ended."""
        usable = asyncio.Event()
        add, remove = (
            (self._loop.add_writer, self._loop.remove_writer)
            if writing
            else (self._loop.add_reader, self._loop.remove_reader)
        )
        add(fd, usable.set)
        waiting = asyncio.ensure_future(usable.wait())
        try:
            futures: list[asyncio.Future[Any]] = [waiting, self._request.exit_status]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            # A descriptor that was closed meanwhile may have been reused.
            if fd in (self._stdin, self._output):
                remove(fd)

    def _close_input(self) -> None:
        if self._stdin >= 0:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1
            self._closed(self)


def exit_code(status: int | None) -> int:
    """Convert a wait status to a shell's exit code."""
    if status is None:
        return 137
    return 128 - status if status < 0 else status


_CHUNK: Final = 65_536
_MAX_REMAINDER: Final = 2**20 + _CHUNK
"""Bytes read after a command's end: more than a pipe holds, so all its own output is included."""


class Collector(HeadTailBuffer):
    """The head and tail (``limit`` bytes) of the data of an owned pipe."""

    def __init__(self, fd: int, limit: int) -> None:
        super().__init__(limit)
        self._loop = asyncio.get_running_loop()
        self.fd = fd
        self._dropping = False
        self.done: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    @property
    def closed(self) -> bool:
        """Whether all writers are gone, or this was closed."""
        return self.fd < 0

    def finish(self) -> None:
        """Take the buffered data and drop what comes later, so that writers neither block nor fail."""
        size_read = 0
        while not self.closed and size_read < _MAX_REMAINDER:
            size = self._read()
            if size <= 0:
                break
            size_read += size
        self._dropping = True

    def close(self) -> None:
        """Stop reading; idempotent."""
        if self.fd >= 0:
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.fd = -1
            if not self.done.done():
                self.done.set_result(None)

    def _read(self) -> int:
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return -1
        if not data:
            self.close()
            return 0
        if not self._dropping:
            self.add(data)
        return len(data)
