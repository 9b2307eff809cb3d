"""The host's end of the launcher process, which starts all sandboxes of one backend."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from turnwise.errors import SandboxStartError, undo_on_error
from turnwise.sandboxes.local.channel import MAX_MESSAGE, memory_file

_PROGRAM: Final = "import sys; sys.path.append(sys.argv.pop(1)); from boot.launcher import main; main()"
_END_SECONDS: Final = 30.0


class Launcher:
    """The launcher process of one backend; it and all its sandboxes die with this process.

    It removes the folder ``state`` at its end and holds the lock ``lock`` until then.
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
        """Start a sandbox; the future is done when it has ended completely. Raises SandboxStartError."""
        end: asyncio.Future[int] = self._loop.create_future()
        self._boxes[plan["id"]] = end
        self._send({"op": "start", **plan}, fds)
        return end

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
            self._mark_dead()
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
            if len(data) > MAX_MESSAGE:
                data, passed = b"memfd", [memory_file(data), *map(os.dup, fds)]
            else:
                passed = [os.dup(fd) for fd in fds]
        except OSError as error:
            raise SandboxStartError(f"a request to the sandbox launcher could not be made: {error}") from error
        self._queue.append((data, passed))
        if len(self._queue) == 1:
            self._flush()
        if self.dead:
            raise SandboxStartError("the sandbox launcher is gone")

    def _flush(self) -> None:
        """Send queued requests as far as the launcher accepts them, without blocking this process."""
        while self._queue:
            data, fds = self._queue[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._end.sendmsg([data], ancillary)
            except BlockingIOError:
                self._loop.add_writer(self._end.fileno(), self._flush)
                return
            except OSError:
                self._mark_dead()
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
                self._mark_dead()
                return
            message = json.loads(data)
            if "exit" in message:
                end = self._boxes.pop(message["exit"], None)
                if end is not None and not end.done():
                    end.set_result(message["status"])
            else:
                answer = self._calls.pop(message["call"], None)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _mark_dead(self) -> None:
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
        for end in boxes.values():
            if not end.done():
                end.set_result(-9)
        for call in calls.values():
            if not call.done():
                call.set_result({"error": "the sandbox launcher is gone"})
