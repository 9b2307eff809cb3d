"""The host's end of the launcher process, which starts all sandboxes of one backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from turnwise.errors import SandboxStartError, undo_on_error
from turnwise.sandboxes.local.packets import PacketSocket

_PROGRAM: Final = "import sys; sys.path.append(sys.argv.pop(1)); from boot.launcher import main; main()"
_END_SECONDS: Final = 30.0


class Launcher(PacketSocket):
    """The launcher process of one backend; it and all its sandboxes die with this process.

    It removes the folder ``state`` at its end and holds the lock ``lock`` until then.
    """

    def __init__(self, state: Path, lock: int) -> None:
        self._boxes: dict[str, asyncio.Future[int]] = {}
        self._calls: dict[str, asyncio.Future[dict[str, Any]]] = {}
        end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, undo_on_error(end.close):
            arguments = (str(Path(__file__).parent), str(theirs.fileno()), str(lock))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
                pass_fds=[theirs.fileno(), lock],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C"},
                cwd="/",
            )
        os.close(lock)
        super().__init__(end)
        self._request({"op": "hello", "state": str(state)})

    def start(self, plan: dict[str, Any], fds: Sequence[int]) -> asyncio.Future[int]:
        """Start a sandbox; the future is done when it has ended completely. Raises SandboxStartError."""
        end: asyncio.Future[int] = self._loop.create_future()
        self._boxes[plan["id"]] = end
        self._request({"op": "start", **plan}, fds)
        return end

    def stop(self, name: str) -> None:
        """Kill a sandbox; a no-op after its end."""
        if not self.dead and name in self._boxes:
            with contextlib.suppress(SandboxStartError):
                self._request({"op": "stop", "id": name})

    async def call(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Make a request about a sandbox; return the answer, whose ``error`` may be empty. Raises SandboxStartError."""
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._calls[name] = answer
        self._request({**request, "call": name})
        return await answer

    def kill(self) -> None:
        """Kill the launcher and with it all sandboxes, as it answers nothing; see :meth:`end`."""
        self._process.kill()

    async def end(self) -> None:
        """Kill all sandboxes and the launcher."""
        self.close()
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            self._send(json.dumps(message).encode(), fds)
        except BrokenPipeError:
            raise SandboxStartError("the sandbox launcher is gone") from None
        except OSError as error:
            raise SandboxStartError(f"a request to the sandbox launcher could not be made: {error}") from error

    def _take(self, data: bytes, fds: list[int]) -> None:
        del fds
        message = json.loads(data)
        if "exit" in message:
            end = self._boxes.pop(message["exit"], None)
            if end is not None and not end.done():
                end.set_result(message["status"])
        else:
            answer = self._calls.pop(message["call"], None)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _lose(self) -> None:
        boxes, self._boxes = self._boxes, {}
        calls, self._calls = self._calls, {}
        for end in boxes.values():
            if not end.done():
                end.set_result(-9)
        for call in calls.values():
            if not call.done():
                call.set_result({"error": "the sandbox launcher is gone"})
