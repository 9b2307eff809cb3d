"""Workers: processes of another interpreter that run the episodes of a foreign framework."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from turnwise.envs.rewards.endpoint import PerLoop
from turnwise.errors import EnvError
from turnwise.ext.frameworks.foreign.inside.core import Failure
from turnwise.ext.frameworks.foreign.inside.serve import MOST_BYTES
from turnwise.inference.guard.turnwise_guard import child_environment

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


@dataclass(slots=True)
class _Waiting:
    """A request without an answer.

    Attributes:
        answer: What waits for the answer.
        what: Its operation.
        seconds: Its time limit.
        since: When its time began.
        timer: Ends the worker, or None.
    """

    answer: asyncio.Future[dict[str, Any]]
    what: str
    seconds: float
    since: float
    timer: asyncio.TimerHandle | None = None


class Worker:
    """A process and the requests that wait for it. One that dies or does not answer in time fails all of them.

    A worker takes requests in their order, and most occupy it until they are answered: the time of a request begins
    anew with each answer to an earlier one.

    Attributes:
        episodes: Ids of the episodes in it.
        ended: Why it takes no requests, or None.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.episodes: set[int] = set()
        self.ended: str | None = None
        self._spec = spec
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._output = b""
        self._imported = False

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    async def start(self) -> None:
        """Start the process. Raises EnvError."""
        ours, theirs = socket.socketpair()
        memory = [] if self._spec.memory is None else ["--memory", str(self._spec.memory)]
        # It is killed in the end, and frameworks leave temporary files.
        self._temporary = tempfile.TemporaryDirectory(prefix="turnwise-worker-", ignore_cleanup_errors=True)
        # A pipe of our own: with one of asyncio's the end of a process is not seen while a child of it holds the pipe.
        output_read, output_write = os.pipe()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(self._spec.python, str(_SCRIPT), self._spec.driver, "--fd", str(theirs.fileno()), *memory),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output_write,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    # Some environments draw by the order of sets: members of a group may be in several workers.
                    env={"PYTHONHASHSEED": "0", **child_environment(), "TMPDIR": self._temporary.name},
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                os.close(output_read)
                self._temporary.cleanup()
                raise EnvError(f"the interpreter {self._spec.python} cannot be started: {error}") from error
            finally:
                os.close(output_write)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=2 * MOST_BYTES)
        # Before the tasks that answer it.
        ready = self._expect(0, "start", _START_SECONDS)
        output, read = asyncio.ensure_future(self._keep_output(output_read)), asyncio.ensure_future(self._read(reader))
        self._tasks = [output, read, asyncio.ensure_future(self._watch(output, read))]
        try:
            await asyncio.shield(ready)
        except EnvError as error:
            await self.close()
            hint = f"is {self._spec.python} an interpreter, of Python 3.10 or newer? Name one by python=PATH"
            raise EnvError(f"{error}; {hint}") from error
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
        line = _encode_line({**request, "id": number})
        if len(line) > MOST_BYTES:
            raise EnvError(f"{self._name}: {request['op']} has {len(line)} bytes; at most {MOST_BYTES} are taken")
        answer = self._expect(number, str(request["op"]), timeout)
        self._writer.write(line)
        # Shielded: a cancelled waiter leaves the timer running.
        response = await asyncio.shield(answer)
        if "error" in response:
            failure = dict(response["error"])
            raise Failure(failure.pop("kind"), failure.pop("message"), **failure)
        result: dict[str, Any] = response["result"]
        return result

    async def close(self) -> None:
        """Kill the process and all that it started."""
        self._end("the worker was closed")
        await self._process.wait()
        # A process that left the group may hold the pipe or the socket open.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._temporary.cleanup)

    def _expect(self, number: int, what: str, seconds: float) -> asyncio.Future[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop.create_future(), what, seconds, loop.time())
        self._waiting[number] = waiting
        self._arm(waiting)
        return waiting.answer

    def _arm(self, waiting: _Waiting) -> None:
        # A timer, not asyncio.timeout: it also ends a worker whose waiter was cancelled.
        seconds = waiting.seconds if self._imported else max(waiting.seconds, _START_SECONDS)
        loop = asyncio.get_running_loop()
        waiting.timer = loop.call_at(waiting.since + seconds, self._late, waiting, seconds)

    def _late(self, waiting: _Waiting, seconds: float) -> None:
        if waiting.since + seconds > asyncio.get_running_loop().time():
            self._arm(waiting)
        else:
            self._end(f"{self._name}: {waiting.what} did not end within {seconds:g} s, so it was killed")

    def _resolve_answer(self, answer: dict[str, Any]) -> None:
        number = answer.get("id", 0)
        request = self._waiting.pop(number, None)
        if request is None:
            return
        if request.timer is not None:
            request.timer.cancel()
        now = asyncio.get_running_loop().time()
        for later, waiting in self._waiting.items():
            if later > number:
                waiting.since = now
        if number and not self._imported:
            self._imported = True
            for waiting in self._waiting.values():
                if waiting.timer is not None:
                    waiting.timer.cancel()
                self._arm(waiting)
        if not request.answer.done():
            request.answer.set_result(answer)

    @property
    def _name(self) -> str:
        return f"the worker {self._process.pid} ({self._spec.python})"

    async def _read(self, reader: asyncio.StreamReader) -> None:
        # Until the end, or a line that is too long or no JSON.
        with contextlib.suppress(ConnectionError, ValueError):
            while (line := await reader.readline()).endswith(b"\n"):
                self._resolve_answer(orjson.loads(line))

    async def _watch(self, output: asyncio.Task[None], read: asyncio.Task[None]) -> None:
        """End the worker with its process or its socket; a process that it forked may hold either open."""
        exited = asyncio.ensure_future(self._process.wait())
        await asyncio.wait([exited, read], return_when=asyncio.FIRST_COMPLETED)
        # What it answered before its death is taken, unless something holds the socket open.
        await asyncio.wait([read], timeout=1.0)
        if self.ended is not None:
            return
        self._kill()
        code = await exited
        # The error quotes the last output, which is read before it.
        await asyncio.wait([output], timeout=1.0)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
        last_output = self._output[-_SHOWN_OUTPUT:].decode("utf-8", "replace").strip()
        self._end(f"{self._name} {how}" + (f"; its last output: {last_output}" if last_output else ""))

    async def _keep_output(self, descriptor: int) -> None:
        stream, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        pipe = open(descriptor, "rb", buffering=0)  # noqa: ASYNC230, SIM115 - the transport closes it
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        try:
            while chunk := await stream.read(_CHUNK):
                self._output = (self._output + chunk)[-_KEPT_OUTPUT:]
        finally:
            transport.close()

    def _end(self, why: str) -> None:
        if self.ended is None:
            self.ended = why
        self._kill()
        self._writer.close()
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            if request.timer is not None:
                request.timer.cancel()
            if not request.answer.done():
                request.answer.set_exception(EnvError(self.ended))
                # Retrieved here: a waiter that was cancelled does not.
                request.answer.exception()

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
            for dead in [worker for worker in workers if worker.ended is not None]:
                workers.remove(dead)
                await dead.close()
            idlest = min(workers, key=lambda worker: len(worker.episodes), default=None)
            if idlest is None or (idlest.episodes and len(workers) < spec.processes):
                idlest = Worker(spec)
                await idlest.start()
                workers.append(idlest)
            idlest.episodes.add(episode)
            return idlest

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

    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    interrupted = threading.Event()

    async def run() -> dict[str, Any]:
        task = asyncio.ensure_future(ask())
        running.append((asyncio.get_running_loop(), task))
        if interrupted.is_set():
            task.cancel()
        return await task

    # In a thread: the caller's may run an event loop.
    with ThreadPoolExecutor(1) as threads:
        try:
            answer = threads.submit(lambda: asyncio.run(run()))
            # In pieces: a signal just before a wait begins does not interrupt it.
            while not answer.done():
                wait([answer], timeout=1.0)
            return answer.result()
        except BaseException:  # an interrupt: leaving the block waits for the thread, hence for the request
            interrupted.set()
            for loop, task in running:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(task.cancel)
            raise


def _encode_line(request: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(request) + b"\n"
    except TypeError:
        # What a model writes may have whole numbers of more than 64 bits.
        return json.dumps(request).encode() + b"\n"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
