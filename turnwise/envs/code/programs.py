"""A program in a sandbox that answers lines by lines, and is started anew where it ended.

Owns: :class:`Programs`. What it runs is not trusted: it may end itself, its sandbox, or never answer. Refuses:
knowing what the lines mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from turnwise.errors import SandboxDied
from turnwise.sandboxes.core import Sandbox, SandboxProcess

_LONGEST_LINE: Final = 16 * 2**20
_WRITE_S: Final = 30.0
_MOST_DEATHS: Final = 2
"""So many sandboxes may end under a solution. One may be the machine's doing; the second is the solution's."""


class Ended(Exception):
    """The program ended before it answered; it is started anew for the next question."""


class Hopeless(Exception):
    """The program cannot answer anything."""


class Programs:
    """One program, over as many processes (and sandboxes) as it takes.

    Args:
        open_sandbox: Returns a clean, started sandbox.
        close_sandbox: Closes one.
        command: What is started.
        opening: Its first line.
        start: Seconds within which the first line is answered, by ``{"ok": null}`` or ``{"err": [name, text]}``; None:
            it is not answered.
    """

    def __init__(
        self,
        open_sandbox: Callable[[], Awaitable[Sandbox]],
        close_sandbox: Callable[[Sandbox], Awaitable[None]],
        command: Sequence[str],
        opening: Mapping[str, Any],
        *,
        start: float | None = None,
    ) -> None:
        self._open, self._close = open_sandbox, close_sandbox
        self._command = list(command)
        self._opening = json.dumps(opening).encode() + b"\n"
        self._start = start
        self._sandbox: Sandbox | None = None
        self._process: SandboxProcess | None = None
        self._buffer = b""
        self._deaths = 0

    async def ask(self, question: Mapping[str, Any], timeout: float) -> dict[str, Any] | None:
        """Write a line and return the answer to it; None where it did not come in time (the program is ended then).

        Raises:
            Ended: The program ended.
            Hopeless: It does not begin at all, or ends its sandboxes.
            SandboxError: A sandbox failed.
        """
        await self.put(json.dumps(question).encode() + b"\n")
        line = await self.line(timeout)
        if line is None:
            await self.restart()
            return None
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            await self.restart()
            raise Ended("the answer is no answer")
        return found

    async def put(self, line: bytes) -> None:
        """Write a line. Raises what :meth:`ask` raises."""
        process = await self._running()
        try:
            async with asyncio.timeout(_WRITE_S):
                await process.write(line)
        except (BrokenPipeError, TimeoutError):
            await self.restart()
            raise Ended("the process of the solution ended") from None
        except SandboxDied as error:
            await self._died(error)

    async def line(self, timeout: float) -> bytes | None:
        """Return the next line, its end included; None where none came in time.

        Raises:
            Ended: The program ended.
            Hopeless: It ends its sandboxes.
        """
        process = await self._running()
        try:
            async with asyncio.timeout(timeout):
                while b"\n" not in self._buffer:
                    data = await process.read(2**20)
                    if not data or len(self._buffer) > _LONGEST_LINE:
                        await self.restart()
                        raise Ended("the process of the solution ended" if not data else "too much was written")
                    self._buffer += data
        except TimeoutError:
            return None
        except SandboxDied as error:
            await self._died(error)
        found, _, self._buffer = self._buffer.partition(b"\n")
        return found + b"\n"

    async def begin(self) -> None:
        """Start it ahead; whatever is wrong is told by the first question. Raises SandboxError where one failed."""
        with contextlib.suppress(Ended, Hopeless):
            await self._running()

    async def restart(self) -> None:
        """End the process; the next question starts another one."""
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            try:
                await process.kill()
            except SandboxDied:
                await self._drop()

    async def end(self) -> None:
        """End the process, and close the sandbox."""
        self._process = None
        await self._drop()

    async def _drop(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._close(sandbox)

    async def _died(self, error: SandboxDied) -> NoReturn:
        self._deaths += 1
        self._process, self._buffer = None, b""
        await self._drop()
        if self._deaths >= _MOST_DEATHS:
            raise Hopeless("the solution ended its sandbox") from error
        raise Ended("the sandbox of the solution ended") from error

    async def _running(self) -> SandboxProcess:
        if self._process is not None:
            return self._process
        if self._deaths >= _MOST_DEATHS:
            raise Hopeless("the solution ended its sandbox")
        if self._sandbox is None:
            self._sandbox = await self._open()
        self._buffer = b""
        try:
            process = self._process = await self._sandbox.spawn(self._command, env={"PYTHONHASHSEED": "0"})
            await process.write(self._opening)
        except SandboxDied as error:
            await self._died(error)
        except BrokenPipeError:
            await self.restart()
            raise Hopeless("there is no Python that runs in this sandbox, or the solution ended it at once") from None
        if self._start is not None:
            line = await self.line(self._start)
            told = {} if line is None else _object(line)
            if "ok" not in told:
                await self.restart()
                parts = told.get("err", ["TimeoutError", "the solution was not loaded in time"])
                raise Hopeless(": ".join(str(part) for part in parts)[:500])
        return process


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
