"""The host's end of a sandbox's control socket."""

from __future__ import annotations

import array
import asyncio
import itertools
import marshal
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from turnwise.errors import SandboxDied, undo_on_error

MAX_MESSAGE: Final = 60_000
"""Bytes of a request that fit into one message; a longer request is passed as a memory file."""


class RequestRefused(Exception):
    """The agent refused a request: errno, subject (``cwd``, ``program``, ``file`` or ``fork``) and reason."""

    def __init__(self, number: int, what: str, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.what = what
        self.reason = reason


@dataclass(slots=True)
class Request:
    """One request in flight.

    Attributes:
        started: Done when a spawned command runs.
        exit_status: Exit status, negative for a signal; None if it was killed without one.
        gone: Done when no process is left after a kill.
        descriptor: Descriptor that came with the answer, or -1.
    """

    id: str
    started: asyncio.Future[None]
    exit_status: asyncio.Future[int | None]
    gone: asyncio.Future[None] = field(repr=False)
    descriptor: int = -1


class Channel:
    """Concurrent requests to one agent over an owned socket; ``lost`` returns why the sandbox is gone."""

    def __init__(self, end: socket.socket, lost: Callable[[], str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._lost = lost
        self._ids = itertools.count(1)
        self._open: dict[str, Request] = {}
        self._killing: set[str] = set()
        # The version of the Python that the agent runs on.
        self.ready: asyncio.Future[int] = self._loop.create_future()
        self.ready.add_done_callback(mark_retrieved)
        self.dead = False
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._receive)

    async def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message without an answer. Raises SandboxDied."""
        data = marshal.dumps(message, 2)
        memory = None
        if len(data) > MAX_MESSAGE:
            memory = memory_file(data)
            data, fds = b"memfd", (memory, *fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            while True:
                if self.dead:
                    raise SandboxDied(self._lost())
                try:
                    self._end.sendmsg([data], ancillary)
                except BlockingIOError:
                    await asyncio.sleep(0.002)
                except OSError:
                    self._die()
                else:
                    return
        finally:
            if memory is not None:
                os.close(memory)

    async def request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> Request:
        """Send a request and return it in flight. Raises SandboxDied."""
        name = str(next(self._ids))
        request = Request(name, self._loop.create_future(), self._loop.create_future(), self._loop.create_future())
        for future in (request.started, request.exit_status, request.gone):
            future.add_done_callback(mark_retrieved)
        self._open[name] = request
        with undo_on_error(lambda: self._open.pop(name, None)):
            await self.send({**message, "id": name}, fds)
        return request

    async def kill(self, request: Request, seconds: float) -> bool:
        """Kill a request's processes; return whether none is left within ``seconds``. Raises SandboxDied."""
        self._open[request.id] = request
        self._killing.add(request.id)
        try:
            await self.send({"op": "kill", "id": request.id})
            done, _ = await asyncio.wait([request.gone], timeout=seconds)
        finally:
            self._killing.discard(request.id)
            self._open.pop(request.id, None)
        if done and (error := request.gone.exception()) is not None:
            raise error
        return bool(done)

    def close(self) -> None:
        """Close the host end, which ends the sandbox; idempotent."""
        self._die()

    def _receive(self) -> None:
        for _ in range(64):
            try:
                data, fds, _, _ = socket.recv_fds(self._end, 65_536, 4, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._die()
                return
            self._handle_answer(data.decode("utf-8", "replace").split(" ", 4), fds)

    def _handle_answer(self, words: list[str], fds: list[int]) -> None:
        kind, name = words[0], words[1]
        if kind == "ready":
            if not self.ready.done():
                self.ready.set_result(int(name))
            return
        request = self._open.get(name)
        if request is not None and fds and request.descriptor < 0:
            request.descriptor = fds.pop()
        for fd in fds:
            os.close(fd)
        if request is None:
            return
        if kind == "started":
            _complete(request.started, None)
            return
        # An ended request is forgotten, unless a kill still waits for its other processes.
        if kind == "gone" or name not in self._killing:
            self._open.pop(name)
        if kind == "fail":
            error = RequestRefused(int(words[2]), words[3], words[4] if len(words) > 4 else "")
            for future in (request.started, request.exit_status):
                if not future.done():
                    future.set_exception(error)
        else:
            status = int(words[2]) if kind == "exit" else None
            _complete(request.started, None)
            if not request.exit_status.done():
                request.exit_status.set_result(status)
        if kind == "gone":
            _complete(request.gone, None)

    def _die(self) -> None:
        if self.dead:
            return
        self.dead = True
        self._loop.remove_reader(self._end.fileno())
        self._end.close()
        futures: list[asyncio.Future[Any]] = [self.ready]
        for request in self._open.values():
            futures += [request.started, request.exit_status, request.gone]
        self._open.clear()
        for future in futures:
            if not future.done():
                future.set_exception(SandboxDied(self._lost()))


def memory_file(data: bytes) -> int:
    """Return a memory file (memfd) with some bytes, positioned at its start."""
    fd = os.memfd_create("turnwise")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def _complete(future: asyncio.Future[None], value: None) -> None:
    if not future.done():
        future.set_result(value)


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved."""
    if not future.cancelled():
        future.exception()
