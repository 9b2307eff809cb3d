"""The host's end of a sandbox's control socket."""

from __future__ import annotations

import asyncio
import itertools
import marshal
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import SandboxDied, undo_on_error
from turnwise.sandboxes.local.packets import PacketSocket


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


class Channel(PacketSocket):
    """Concurrent requests to one agent over an owned socket; ``why_lost`` returns why the sandbox is gone."""

    def __init__(self, end: socket.socket, why_lost: Callable[[], str]) -> None:
        super().__init__(end)
        self._why_lost = why_lost
        self._ids = itertools.count(1)
        self._open: dict[str, Request] = {}
        self._killing: set[str] = set()
        # The version of the Python that the agent runs on.
        self.ready: asyncio.Future[int] = self._loop.create_future()
        self.ready.add_done_callback(mark_retrieved)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message without an answer. Raises SandboxDied."""
        try:
            self._send(marshal.dumps(message, 2), fds)
        except BrokenPipeError:
            raise SandboxDied(self._why_lost()) from None

    def request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> Request:
        """Send a request and return it in flight. Raises SandboxDied."""
        name = str(next(self._ids))
        request = Request(name, self._loop.create_future(), self._loop.create_future(), self._loop.create_future())
        for future in (request.started, request.exit_status, request.gone):
            future.add_done_callback(mark_retrieved)
        self._open[name] = request
        with undo_on_error(lambda: self._open.pop(name, None)):
            self.send({**message, "id": name}, fds)
        return request

    async def kill(self, request: Request, seconds: float) -> bool:
        """Kill a request's processes; return whether none is left within ``seconds``. Raises SandboxDied."""
        self._open[request.id] = request
        self._killing.add(request.id)
        try:
            self.send({"op": "kill", "id": request.id})
            done, _ = await asyncio.wait([request.gone], timeout=seconds)
        finally:
            self._killing.discard(request.id)
            self._open.pop(request.id, None)
        if done and (error := request.gone.exception()) is not None:
            raise error
        return bool(done)

    def _take(self, data: bytes, fds: list[int]) -> None:
        words = data.decode("utf-8", "replace").split(" ", 4)
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

    def _lose(self) -> None:
        futures: list[asyncio.Future[Any]] = [self.ready]
        for request in self._open.values():
            futures += [request.started, request.exit_status, request.gone]
        self._open.clear()
        for future in futures:
            if not future.done():
                future.set_exception(SandboxDied(self._why_lost()))


def _complete(future: asyncio.Future[None], value: None) -> None:
    if not future.done():
        future.set_result(value)


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved."""
    if not future.cancelled():
        future.exception()
