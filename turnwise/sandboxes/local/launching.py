"""The host's side of the launcher.

Owns: starting it, asking it for sandboxes, and hearing of their ends. Refuses: what a plan holds (``plans.py``).
"""

from __future__ import annotations

import array
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

from turnwise.errors import SandboxStartError
from turnwise.sandboxes.local.channel import in_memory

_PROGRAM: Final = "import sys; sys.path.append(sys.argv.pop(1)); from boot.launcher import main; main()"
_DIRECT: Final = 60_000
_END_SECONDS: Final = 30.0


class Launcher:
    """The launcher process of one backend. Everything that it started ends with it, and it ends with this process.

    Args:
        state: The folder that it removes at its end.
        lock: The descriptor of the folder's lock, which it holds as long as it lives; owned from now on.
    """

    def __init__(self, state: Path, lock: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._boxes: dict[str, asyncio.Future[int]] = {}
        self._calls: dict[str, asyncio.Future[str]] = {}
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
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
        """Begin a sandbox; the result is done when nothing of it is left.

        Raises:
            SandboxStartError: The launcher is gone.
        """
        over: asyncio.Future[int] = self._loop.create_future()
        self._boxes[plan["id"]] = over
        self._send({"op": "start", **plan}, fds)
        return over

    def stop(self, name: str) -> None:
        """End a sandbox by force. One that has ended is no error."""
        if not self.dead and name in self._boxes:
            with contextlib.suppress(SandboxStartError):
                self._send({"op": "stop", "id": name}, ())

    async def call(self, name: str, request: dict[str, Any]) -> str:
        """Ask for something about a sandbox, and return what went wrong; empty where nothing did.

        Raises:
            SandboxStartError: The launcher is gone.
        """
        answer: asyncio.Future[str] = self._loop.create_future()
        self._calls[name] = answer
        self._send({**request, "call": name}, ())
        return await answer

    async def close(self) -> None:
        """End all sandboxes and the launcher."""
        if not self.dead:
            self._over()
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        data = json.dumps(message).encode()
        held = None
        if len(data) > _DIRECT:
            held = in_memory(data)
            data, fds = b"memfd", (held, *fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            # A message is taken whole or not at all, and the launcher does nothing that lasts: it is waited for.
            self._end.setblocking(True)
            self._end.sendmsg([data], ancillary)
        except OSError as error:
            self._over()
            raise SandboxStartError(f"the sandbox launcher is gone: {error}") from error
        finally:
            if self._end.fileno() >= 0:
                self._end.setblocking(False)
            if held is not None:
                os.close(held)

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
                    answer.set_result(message["error"])

    def _over(self) -> None:
        if self.dead:
            return
        self._loop.remove_reader(self._end.fileno())
        self._end.close()
        boxes, self._boxes = self._boxes, {}
        calls, self._calls = self._calls, {}
        for each in boxes.values():
            if not each.done():
                each.set_result(-9)
        for call in calls.values():
            if not call.done():
                call.set_result("the sandbox launcher is gone")
