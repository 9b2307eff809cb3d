"""Programs that stay, and are given one episode after the other.

Owns: :class:`Workers` and the lines by which an episode is given and answered. Refuses: what an episode means.

A worker reads lines of JSON: ``id``, ``prompt``, ``model``, ``api_key``, ``base_url``, ``openai_base_url``,
``anthropic_base_url``, ``tools_url``, ``mcp_url``, ``max_turns``. It writes one line for each: ``{"id": ..., "answer":
...}`` with a text or null (its last message then counts), or ``{"id": ..., "error": ...}``. Other lines are its own
business. Its standard input ends when nothing more is to be done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.agents.blackbox.program import Exit, Program

Start = Callable[[int, Callable[[bytes], None]], Awaitable["tuple[Program, Callable[[], None]]"]]
"""Starts a program that reads from a descriptor, and says where its lines go; returns it, and what is to be done when
it has ended."""


@dataclass(frozen=True, slots=True)
class Said:
    """A worker's answer to an episode.

    Attributes:
        answer: Its answer; None leaves it to its last message.
        error: What it failed with, or None.
    """

    answer: str | None
    error: str | None


class Worker:
    """One program that stays; made by :meth:`start`."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Said]] = {}
        self._program: Program | None = None
        self._lines: asyncio.WriteTransport | None = None
        self._ended = _nothing

    async def start(self, start: Start) -> None:
        """Start it.

        Raises:
            ProgramError: It cannot be started.
        """
        read, write = os.pipe()
        file = os.fdopen(write, "wb", buffering=0)
        self._lines, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.Protocol, file)
        try:
            self._program, self._ended = await start(read, self._read)
        except BaseException:  # also a cancellation: the pipe is closed
            self._hang_up()
            raise

    @property
    def program(self) -> Program:
        """The program."""
        assert self._program is not None
        return self._program

    async def serve(self, job: Mapping[str, Any]) -> Said | None:
        """Give it an episode and wait for its answer; None where it ended instead."""
        assert self._lines is not None
        answer: asyncio.Future[Said] = asyncio.get_running_loop().create_future()
        self._waiting[job["id"]] = answer
        over: asyncio.Future[Any] = asyncio.ensure_future(self.program.wait())
        try:
            self._lines.write(json.dumps(job).encode() + b"\n")
            either: set[asyncio.Future[Any]] = {answer, over}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            over.cancel()
            del self._waiting[job["id"]]

    async def end(self) -> Exit:
        """End it and all that it started."""
        try:
            return await self.program.end()
        finally:
            self._hang_up()
            self._ended()

    def _hang_up(self) -> None:
        # Where the other end is closed, this one is by now, and must not be closed again.
        if self._lines is not None and not self._lines.is_closing():
            self._lines.abort()

    def _read(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        waiting = self._waiting.get(str(said.get("id"))) if isinstance(said, dict) else None
        if waiting is None or waiting.done() or not ({"answer", "error"} & said.keys()):
            return
        answer, error = said.get("answer"), said.get("error")
        waiting.set_result(Said(None if answer is None else str(answer), None if error is None else str(error)))


class Workers:
    """A number of workers, started when they are first needed.

    Args:
        count: The most that run at the same time.
        start: Starts one.
    """

    def __init__(self, count: int, start: Start) -> None:
        self._slots = asyncio.Semaphore(count)
        self._start = start
        self._idle: list[Worker] = []

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Worker]:
        """Lend a worker. One that ended meanwhile, or whose block ended with an error, is not lent again."""
        async with self._slots:
            worker = await self._one()
            try:
                yield worker
            except BaseException:  # also a cancellation: a worker in the middle of a call is not reused
                await worker.end()
                raise
            if worker.program.running:
                self._idle.append(worker)
            else:
                await worker.end()

    async def close(self) -> None:
        """End those that nobody uses."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(worker.end() for worker in idle))

    async def _one(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.program.running:
                return worker
            await worker.end()
        worker = Worker()
        await worker.start(self._start)
        return worker


def _nothing() -> None:
    pass
