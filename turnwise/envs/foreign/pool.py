"""Workers: processes of another interpreter that run the episodes of a foreign framework."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from turnwise.envs.foreign.inside.core import Failure
from turnwise.envs.foreign.inside.serve import MOST_BYTES
from turnwise.envs.rewards.endpoint import PerLoop
from turnwise.errors import EnvError

_SCRIPT: Final = Path(__file__).with_name("inside") / "serve.py"
_START_SECONDS: Final = 600.0
"""Seconds for an interpreter to start, and for a first request, which imports the framework."""
_KEPT_OUTPUT: Final = 16_384
_SHOWN_OUTPUT: Final = 1_500
_CHUNK: Final = 65_536


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What workers have in common.

    Attributes:
        python: The interpreter.
        driver: Name of a driver, or path of one.
        memory: Limit of a worker's address space in bytes, or None.
        processes: Workers of this kind at the same time.
        only: The environment that they are for; empty where a worker has any.
    """

    python: str
    driver: str
    memory: int | None
    processes: int
    only: str = ""


class Worker:
    """A process and the requests that wait for it. One that dies or does not answer in time fails all of them.

    Attributes:
        episodes: Ids of the episodes in it.
        ended: Why it takes no requests, or None.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.episodes: set[int] = set()
        self.ended: str | None = None
        self._spec = spec
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._output = b""
        self._used = False

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    async def start(self) -> None:
        """Start the process. Raises EnvError."""
        ours, theirs = socket.socketpair()
        memory = [] if self._spec.memory is None else ["--memory", str(self._spec.memory)]
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(self._spec.python, str(_SCRIPT), self._spec.driver, "--fd", str(theirs.fileno()), *memory),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    # Some environments draw by the order of sets: members of a group may be in several workers.
                    env={"PYTHONHASHSEED": "0", **os.environ},
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise EnvError(f"the interpreter {self._spec.python} cannot be started: {error}") from error
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=2 * MOST_BYTES)
        ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[0] = ready
        self._tasks = [asyncio.ensure_future(self._keep_output()), asyncio.ensure_future(self._read(reader))]
        try:
            await self._answer(ready, "start", _START_SECONDS)
        except BaseException:  # also a cancellation: no process is left
            await self.close()
            raise

    async def call(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            EnvError: The worker died or did not answer in time, and is ended.
            Failure: The request failed.
        """
        if self.ended is not None:
            raise EnvError(self.ended)
        number = next(self._numbers)
        line = orjson.dumps({**request, "id": number}) + b"\n"
        if len(line) > MOST_BYTES:
            raise EnvError(f"{self._name}: {request['op']} has {len(line)} bytes; at most {MOST_BYTES} are taken")
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._writer.write(line)
        seconds, self._used = (timeout if self._used else max(timeout, _START_SECONDS)), True
        answer = await self._answer(future, str(request["op"]), seconds)
        if "error" in answer:
            said = dict(answer["error"])
            raise Failure(said.pop("kind"), said.pop("message"), **said)
        result: dict[str, Any] = answer["result"]
        return result

    async def close(self) -> None:
        """Kill the process and all that it started."""
        self._end("the worker was closed")
        await self._process.wait()
        # A process that left the group may hold the pipe open.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, future: asyncio.Future[dict[str, Any]], what: str, seconds: float) -> dict[str, Any]:
        # A timer, not asyncio.timeout: it also ends a worker whose waiter was cancelled.
        late = f"{self._name}: {what} did not end within {seconds:g} s, so it was killed"
        timer = asyncio.get_running_loop().call_later(seconds, self._end, late)
        future.add_done_callback(lambda _: timer.cancel())
        # Shielded: a cancelled waiter leaves the timer running.
        return await asyncio.shield(future)

    @property
    def _name(self) -> str:
        return f"the worker {self._process.pid} ({self._spec.python})"

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            while (line := await reader.readline()).endswith(b"\n"):
                answer = orjson.loads(line)
                future = self._waiting.pop(answer.get("id", 0), None)
                if future is not None and not future.done():
                    future.set_result(answer)
        # The end, or a line that is too long or no JSON. The error quotes the last output, which is read before it.
        if self.ended is None:
            self._kill()
            code = await self._process.wait()
            await asyncio.wait([self._tasks[0]], timeout=1.0)
            how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
            said = self._output[-_SHOWN_OUTPUT:].decode("utf-8", "replace").strip()
            self._end(f"{self._name} {how}" + (f"; its last output: {said}" if said else ""))

    async def _keep_output(self) -> None:
        stream = self._process.stdout
        while stream is not None and (chunk := await stream.read(_CHUNK)):
            self._output = (self._output + chunk)[-_KEPT_OUTPUT:]

    def _end(self, why: str) -> None:
        if self.ended is None:
            self.ended = why
        self._kill()
        self._writer.close()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(EnvError(self.ended))
                # Retrieved here: a waiter that was cancelled does not.
                future.exception()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class WorkerPool:
    """The workers of an event loop, started on demand; a dead one is replaced by the next episode."""

    def __init__(self) -> None:
        self._workers: dict[WorkerSpec, list[Worker]] = {}
        self._starting: dict[WorkerSpec, asyncio.Lock] = {}

    async def take(self, spec: WorkerSpec, episode: int) -> Worker:
        """Return the worker of a new episode: the one with the fewest. Raises EnvError."""
        async with self._starting.setdefault(spec, asyncio.Lock()):
            workers = self._workers.setdefault(spec, [])
            for dead in [each for each in workers if each.ended is not None]:
                workers.remove(dead)
                await dead.close()
            least = min(workers, key=lambda each: len(each.episodes), default=None)
            if least is None or (least.episodes and len(workers) < spec.processes):
                least = Worker(spec)
                await least.start()
                workers.append(least)
            least.episodes.add(episode)
            return least

    async def close(self) -> None:
        """End all workers."""
        for worker in itertools.chain(*self._workers.values()):
            await worker.close()


async def _open_pool() -> WorkerPool:
    return WorkerPool()


@functools.cache
def pools() -> PerLoop[WorkerPool]:
    """Return the pools: one per event loop, closed with it."""
    return PerLoop(_open_pool, WorkerPool.close)


def ask_once(spec: WorkerSpec, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request of a worker that is started for it alone. Blocks; raises EnvError or Failure."""

    async def ask() -> dict[str, Any]:
        worker = Worker(spec)
        await worker.start()
        try:
            return await worker.call(request, _START_SECONDS)
        finally:
            await worker.close()

    # In a thread: the caller's may run an event loop.
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, ask()).result()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
