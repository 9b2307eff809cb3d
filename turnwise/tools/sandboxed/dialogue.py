"""Dialogues of the tools with one running program: a question, and the output up to a marker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from turnwise.errors import SandboxError
from turnwise.sandboxes.core import SandboxProcess
from turnwise.sandboxes.output import HeadTailBuffer

_LONGEST_TAIL: Final = 64 * 1024
"""Bytes that may follow a marker in its line."""
_AFTERMATH_S: Final = 0.2
"""Seconds to wait for the last output of a program that has ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A program's answer: output, the note after the marker (None without marker), whether the program has ended."""

    output: bytes
    note: str | None
    program_ended: bool


class Dialogue:
    """A request-response dialogue with one running program; ``limit`` is the bytes kept of an answer."""

    def __init__(self, process: SandboxProcess, limit: int) -> None:
        self._process = process
        self._limit = limit
        self._output = HeadTailBuffer(limit)
        self._marker = b""
        self._pending = b""
        self._note: str | None = None
        self._ended = False
        self._failure: SandboxError | None = None
        self._progress = asyncio.Event()
        self._pump = asyncio.create_task(self._follow())

    async def ask(self, question: bytes, marker: str, timeout: float | None) -> Answer:
        """Write a question and wait for ``marker``, printed with a note when done. Raises SandboxError."""
        self._marker, self._note = marker.encode(), None
        self._progress.clear()
        try:
            await self._process.write(question)
        except BrokenPipeError:
            # The program has ended, or no longer reads: its last output is the answer.
            timeout = _AFTERMATH_S if timeout is None else min(timeout, _AFTERMATH_S)
        return await self.wait(timeout)

    async def wait(self, timeout: float | None) -> Answer:
        """Continue to wait for the marker. Raises as :meth:`ask`."""
        try:
            async with asyncio.timeout(timeout):
                while self._note is None and not self._ended:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            pass
        if self._failure is not None:
            raise self._failure
        if self._ended:
            # No more output: the held-back bytes are no beginning of a marker.
            self._output.add(self._pending)
            self._pending = b""
        output, self._output = self._output.data, HeadTailBuffer(self._limit)
        return Answer(output, self._note, self._ended)

    async def interrupt(self) -> None:
        """Send SIGINT."""
        await self._process.interrupt()

    async def close(self) -> None:
        """Kill the program; idempotent."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self._process.kill()

    async def exit_code(self) -> int:
        """Return the exit code of a program that has ended."""
        return await self._process.wait()

    async def _follow(self) -> None:
        reading = asyncio.create_task(self._read())
        try:
            # The end of the program, not of its output: background processes may hold that open.
            await self._process.wait()
            await asyncio.wait({reading}, timeout=_AFTERMATH_S)
        except SandboxError as error:
            self._failure = self._failure or error
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._ended = True
            self._progress.set()

    async def _read(self) -> None:
        try:
            while data := await self._process.read():
                self._take(data)
                self._progress.set()
        except SandboxError as error:
            self._failure = error

    def _take(self, data: bytes) -> None:
        data = self._pending + data
        self._pending = b""
        if self._note is not None or not self._marker:
            self._output.add(data)
            return
        output, marker, tail = data.partition(self._marker)
        if not marker:
            held_back = _overlap(data, self._marker)
            self._output.add(data[: len(data) - held_back])
            self._pending = data[len(data) - held_back :]
            return
        note, newline, rest = tail.partition(b"\n")
        if not newline and len(tail) < _LONGEST_TAIL:
            self._output.add(output)
            self._pending = self._marker + tail
            return
        self._output.add(output)
        self._note = note.decode("utf-8", "replace")
        # What follows (from background programs) belongs to the next answer.
        self._marker, self._pending = b"", rest


def _overlap(data: bytes, marker: bytes) -> int:
    """Return the length of the longest suffix of ``data`` that is a prefix of the marker."""
    for size in range(min(len(marker) - 1, len(data)), 0, -1):
        if data.endswith(marker[:size]):
            return size
    return 0
