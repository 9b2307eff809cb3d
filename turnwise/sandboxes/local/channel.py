"""The host's end of a sandbox's control socket, and the launcher process."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import json
import marshal
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from turnwise.errors import SandboxDied, SandboxStartError, undo_on_error

_DIRECT: Final = 60_000
"""Bytes of a request that fits into one message; a longer one travels in memory that is passed along."""


class Refused(Exception):
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
        ended: Exit status, negative for a signal; None if it was killed without one.
        gone: Done when no process is left after a kill.
        handed: Descriptor that came with the answer, or -1.
    """

    id: str
    started: asyncio.Future[None]
    ended: asyncio.Future[int | None]
    gone: asyncio.Future[None] = field(repr=False)
    handed: int = -1


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
        self.ready.add_done_callback(retrieved)
        self.dead = False
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._receive)

    async def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message without an answer. Raises SandboxDied."""
        data = marshal.dumps(message, 2)
        held = None
        if len(data) > _DIRECT:
            held = in_memory(data)
            data, fds = b"memfd", (held, *fds)
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
            if held is not None:
                os.close(held)

    async def request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> Request:
        """Send a request and return it in flight. Raises SandboxDied."""
        name = str(next(self._ids))
        made = Request(name, self._loop.create_future(), self._loop.create_future(), self._loop.create_future())
        for each in (made.started, made.ended, made.gone):
            each.add_done_callback(retrieved)
        self._open[name] = made
        with undo_on_error(lambda: self._open.pop(name, None)):
            await self.send({**message, "id": name}, fds)
        return made

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
            self._answer(data.decode("utf-8", "replace").split(" ", 4), fds)

    def _answer(self, words: list[str], fds: list[int]) -> None:
        kind, name = words[0], words[1]
        if kind == "ready":
            if not self.ready.done():
                self.ready.set_result(int(name))
            return
        request = self._open.get(name)
        if request is not None and fds and request.handed < 0:
            request.handed = fds.pop()
        for fd in fds:
            os.close(fd)
        if request is None:
            return
        if kind == "started":
            _settle(request.started, None)
            return
        # What has ended is forgotten; while it is being killed, its end is not all that is waited for.
        if kind == "gone" or name not in self._killing:
            self._open.pop(name)
        if kind == "fail":
            error = Refused(int(words[2]), words[3], words[4] if len(words) > 4 else "")
            for each in (request.started, request.ended):
                if not each.done():
                    each.set_exception(error)
        else:
            status = int(words[2]) if kind == "exit" else None
            _settle(request.started, None)
            if not request.ended.done():
                request.ended.set_result(status)
        if kind == "gone":
            _settle(request.gone, None)

    def _die(self) -> None:
        if self.dead:
            return
        self.dead = True
        self._loop.remove_reader(self._end.fileno())
        self._end.close()
        waiting = [each for request in self._open.values() for each in (request.started, request.ended, request.gone)]
        self._open.clear()
        every: list[asyncio.Future[Any]] = [self.ready, *waiting]
        for each in every:
            if not each.done():
                each.set_exception(SandboxDied(self._lost()))


def in_memory(data: bytes) -> int:
    """Return a memfd with some bytes, positioned at its start."""
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


def _settle(future: asyncio.Future[None], value: None) -> None:
    if not future.done():
        future.set_result(value)


def retrieved(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved."""
    if not future.cancelled():
        future.exception()


_PROGRAM: Final = "import sys; sys.path.append(sys.argv.pop(1)); from boot.launcher import main; main()"
_END_SECONDS: Final = 30.0


class Launcher:
    """The launcher process of one backend; it and all its sandboxes die with this process.

    It removes the folder ``state`` at its end and holds the lock ``lock`` while it lives.
    """

    def __init__(self, state: Path, lock: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._boxes: dict[str, asyncio.Future[int]] = {}
        self._calls: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, undo_on_error(self._end.close):
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _PROGRAM,
                    str(Path(__file__).parent),
                    str(theirs.fileno()),
                    str(lock),
                ],
                pass_fds=[theirs.fileno(), lock],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C"},
                cwd="/",
            )
        os.close(lock)
        self._end.setblocking(False)
        self._loop.add_reader(self._end.fileno(), self._receive)
        self._send({"op": "hello", "state": str(state)}, ())

    @property
    def dead(self) -> bool:
        """Whether it is gone, and all sandboxes with it."""
        return self._end.fileno() < 0

    def start(self, plan: dict[str, Any], fds: Sequence[int]) -> asyncio.Future[int]:
        """Start a sandbox; the future is done when nothing of it is left. Raises SandboxStartError."""
        over: asyncio.Future[int] = self._loop.create_future()
        self._boxes[plan["id"]] = over
        self._send({"op": "start", **plan}, fds)
        return over

    def stop(self, name: str) -> None:
        """Kill a sandbox; a no-op after its end."""
        if not self.dead and name in self._boxes:
            with contextlib.suppress(SandboxStartError):
                self._send({"op": "stop", "id": name}, ())

    async def call(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Make a request about a sandbox; return the answer, whose ``error`` may be empty. Raises SandboxStartError."""
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._calls[name] = answer
        self._send({**request, "call": name}, ())
        return await answer

    async def close(self) -> None:
        """Kill all sandboxes and the launcher."""
        if not self.dead:
            self._over()
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        """Send a request, or queue it while the launcher is busy; its descriptors may be closed at once."""
        data = json.dumps(message).encode()
        if self.dead:
            raise SandboxStartError("the sandbox launcher is gone")
        try:
            if len(data) > _DIRECT:
                data, given = b"memfd", [in_memory(data), *map(os.dup, fds)]
            else:
                given = [os.dup(fd) for fd in fds]
        except OSError as error:
            raise SandboxStartError(f"a request to the sandbox launcher could not be made: {error}") from error
        self._queue.append((data, given))
        if len(self._queue) == 1:
            self._flush()
        if self.dead:
            raise SandboxStartError("the sandbox launcher is gone")

    def _flush(self) -> None:
        """Send what is queued, as far as the launcher takes it. This process never waits for it."""
        while self._queue:
            data, fds = self._queue[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._end.sendmsg([data], ancillary)
            except BlockingIOError:
                self._loop.add_writer(self._end.fileno(), self._flush)
                return
            except OSError:
                self._over()
                return
            self._queue.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._end.fileno())

    def _receive(self) -> None:
        while True:
            try:
                data = self._end.recv(65_536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._over()
                return
            message = json.loads(data)
            if "exit" in message:
                over = self._boxes.pop(message["exit"], None)
                if over is not None and not over.done():
                    over.set_result(message["status"])
            else:
                answer = self._calls.pop(message["call"], None)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _over(self) -> None:
        if self.dead:
            return
        self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())
        self._end.close()
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()
        boxes, self._boxes = self._boxes, {}
        calls, self._calls = self._calls, {}
        for each in boxes.values():
            if not each.done():
                each.set_result(-9)
        for call in calls.values():
            if not call.done():
                call.set_result({"error": "the sandbox launcher is gone"})
