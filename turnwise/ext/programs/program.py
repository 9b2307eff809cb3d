"""Processes of black-box agents: one program with its process tree, and a pool of persistent workers.

A worker reads JSON lines: ``id``, ``prompt``, ``model``, ``api_key``, ``base_url``, ``openai_base_url``,
``anthropic_base_url``, ``tools_url``, ``mcp_url``, ``max_turns``. It writes one line for each: ``{"id": ..., "answer":
...}`` (text, or null for its last message) or ``{"id": ..., "error": ...}``. Other lines are ignored. EOF on its
standard input means no more work.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Final, Self

from turnwise.errors import AgentError, shown, undo_on_error, undo_on_error_async
from turnwise.sandboxes.output import HeadTailBuffer

MARK: Final = "TURNWISE_PROGRAM"
"""Environment variable of every process of a program, unless the program removes it."""
_SUPERVISOR: Final = Path(__file__).with_name("supervisor.py")
_MACHINE: Final = Path("/proc/vmstat")
_END_S: Final = 20.0
"""Seconds that a supervisor gets to kill a tree before it is killed from here."""
_DRAIN_S: Final = 2.0


class ProgramError(AgentError):
    """A program failed for reasons outside the policy; the attempt may be retried."""

    retryable: ClassVar[bool] = True


class StartError(ProgramError):
    """A program could not be started, or exited before its first model request."""

    at_start: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Output:
    """One captured output stream.

    Attributes:
        text: The whole stream, or its head and tail.
        cut: Whether the middle is left out.
    """

    text: str
    size: int
    cut: bool

    def tail(self, limit: int = 2000) -> str:
        """Return the tail, for error messages."""
        text = self.text.strip()
        return text if len(text) <= limit else f"...{text[-limit:]}"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a program ended.

    Attributes:
        status: Exit status; negative after a signal, None where it was killed from here.
        swept: Killed processes of its tree; None in a sandbox, where they are not counted.
        flooded: Whether it was killed for the amount of its output.
    """

    status: int | None
    stdout: Output
    stderr: Output
    swept: int | None
    flooded: bool = False

    @property
    def killed(self) -> bool:
        """Whether a signal ended it or its supervisor, and not for its output."""
        return not self.flooded and (self.status is None or self.status < 0)


class OutputQuota:
    """Bytes that the outputs of a program may have together; ``exceeded`` is set when they have more."""

    def __init__(self, limit: int | None) -> None:
        self.exceeded = asyncio.Event()
        self._limit = limit
        self._taken = 0

    def take(self, size: int) -> bool:
        """Count bytes; return whether they are within the quota."""
        self._taken += size
        if self._limit is not None and self._taken > self._limit:
            self.exceeded.set()
        return not self.exceeded.is_set()

    def renew(self) -> None:
        """Count from zero, unless the quota is exceeded already."""
        self._taken = 0


class Program:
    """A running program. Use :meth:`start`, and always :meth:`end`."""

    def __init__(
        self, process: asyncio.subprocess.Process, mark: str, stdout: Capture, stderr: Capture, quota: OutputQuota
    ) -> None:
        self.quota = quota
        self._process = process
        self._mark = mark
        self._stdout, self._stderr = stdout, stderr
        self._status: int | None = None
        self._swept, self._all_swept = 0, False
        self._exited = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdin: bytes | int = b"",
        kept_bytes: int = 65536,
        output_limit: int | None = None,
        on_line: Callable[[bytes], None] | None = None,
    ) -> Self:
        """Start a program in its own session.

        Args:
            argv: Command line.
            env: Complete environment.
            cwd: Working directory.
            stdin: Content, or a descriptor, which is closed here.
            kept_bytes: Bytes of each output that are kept.
            output_limit: Bytes of both outputs together; the program is over when it writes more.
            on_line: Called with each line of standard output.
        """
        mark = secrets.token_hex(16)
        quota = OutputQuota(output_limit)
        stdout, stderr = Capture(kept_bytes, quota, on_line), Capture(kept_bytes, quota)
        stdin_file = _file_of(stdin)
        try:
            descriptors = [await stdout.open(), await stderr.open()]
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(_SUPERVISOR), str(stdin_file.fileno()), *map(str, descriptors)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    pass_fds=(stdin_file.fileno(), *descriptors),
                    start_new_session=True,
                )
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except OSError as error:
            await asyncio.gather(stdout.close(0), stderr.close(0))
            raise StartError(f"cannot start a process: {error}") from error
        finally:
            stdin_file.close()
        program = cls(process, mark, stdout, stderr, quota)
        async with undo_on_error_async(program.end):
            await program._begin({"argv": list(argv), "cwd": str(cwd), "env": {**env, MARK: mark}})
        return program

    @property
    def supervisor(self) -> int:
        """Process id of the supervisor, which kills the tree at the end."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the program is still running, within its output limit."""
        return not self._exited.is_set() and not self.quota.exceeded.is_set()

    async def wait(self) -> None:
        """Wait for the program's exit or the end of its output limit; its descendants may still run."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._exited, self.quota.exceeded)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waits:
                future.cancel()

    async def end(self) -> Exit:
        """Kill the rest of the tree and return the exit. Idempotent; cancellation does not stop the kill."""
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._listening is not None:
            await self._listening
        if not self._all_swept:
            # Its supervisor was killed, perhaps by the program: the remaining processes are found by their mark.
            self._swept += await asyncio.to_thread(kill_marked, self._mark)
        stdout, stderr = await asyncio.gather(self._stdout.close(_DRAIN_S), self._stderr.close(_DRAIN_S))
        return Exit(self._status, stdout, stderr, self._swept, self.quota.exceeded.is_set())

    async def _begin(self, spec: Mapping[str, object]) -> None:
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(spec).encode() + b"\n")
            await process.stdin.drain()
        first = await self._read_report()
        if "pid" not in first:
            raise StartError(f"{shown(spec['argv'])} cannot be started: {first.get('failed', 'no reason given')}")
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while report := await self._read_report():
            if "status" in report:
                self._status = report["status"]
                self._exited.set()
            if "swept" in report:
                self._swept, self._all_swept = report["swept"], report["left"] == 0
        # Without a status it was ended from here, or its supervisor was killed.
        self._exited.set()

    async def _read_report(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return json.loads(line) if line else {}


class Capture(asyncio.Protocol):
    """Reads a pipe to its end, or until a quota is exceeded, and keeps head and tail.

    Args:
        quota: Counts what is read.
        on_line: Called with each line, cut to ``kept_bytes`` bytes.
    """

    def __init__(self, kept_bytes: int, quota: OutputQuota, on_line: Callable[[bytes], None] | None = None) -> None:
        self._kept_bytes = kept_bytes
        self._quota = quota
        self._on_line = on_line
        self._buffer, self._line = HeadTailBuffer(kept_bytes), bytearray()
        self._ended = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None

    async def open(self) -> int:
        """Return the write end; the caller closes it."""
        read, write = os.pipe()
        file = os.fdopen(read, "rb", buffering=0)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, file)
        return write

    def data_received(self, data: bytes) -> None:
        """Keep head and tail."""
        if not self._quota.take(len(data)):
            # Further output stays in the pipe and blocks the program until it is killed.
            assert self._transport is not None
            self._transport.pause_reading()
            self._ended.set()
        if self._on_line is not None:
            self._split_lines(data)
        self._buffer.add(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the end is all that counts
        """Record EOF."""
        self._ended.set()

    async def close(self, seconds: float) -> Output:
        """Wait at most ``seconds`` for EOF and return the output."""
        if self._transport is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._ended.wait()
            self._transport.close()
        buffer = self._buffer
        return Output(buffer.data.decode("utf-8", "replace"), buffer.total, buffer.truncated)

    def _split_lines(self, data: bytes) -> None:
        *complete, rest = data.split(b"\n")
        assert self._on_line is not None
        for part in complete:
            self._on_line(bytes(self._line + part))
            self._line.clear()
        self._line += rest[: max(0, self._kept_bytes - len(self._line))]


def _file_of(stdin: bytes | int) -> IO[bytes]:
    """Return the input as a temporary file, so that a slow reader blocks nothing."""
    if isinstance(stdin, int):
        return os.fdopen(stdin, "rb", buffering=0)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(stdin)
    file.seek(0)
    return file


def count_oom_kills() -> int:
    """Return how many processes this machine has killed for want of memory, 0 where it does not say."""
    with contextlib.suppress(OSError):
        counts = dict(line.split(maxsplit=1) for line in _MACHINE.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


def kill_marked(mark: str, seconds: float = 10.0) -> int:
    """Kill every process whose environment holds the mark; return how many there were."""
    variable = f"{MARK}={mark}".encode()
    killed: set[int] = set()
    until = time.monotonic() + seconds
    while pids := _marked_processes(variable):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= pids
        if time.monotonic() > until:
            break
        # The kernel takes a moment to end them and notifies their parent alone.
        time.sleep(0.005)
    return len(killed)


def _marked_processes(variable: bytes) -> set[int]:
    pids = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            # It is empty for a thread that ended, as the first may, and refused for processes of other users.
            for path in glob.iglob(f"/proc/{name}/task/*/environ"):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    if environment := file.read():
                        pids |= {int(name)} if variable in environment.split(b"\0") else set()
                        break
    return pids


Start = Callable[[int, Callable[[bytes], None]], Awaitable["tuple[Program, Callable[[], None]]"]]
"""Starts a program that reads from a descriptor, with a handler for its lines; returns it and its end callback."""


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """A worker's result for one episode.

    Attributes:
        answer: The answer; None stands for its last message.
        error: The reported failure, or None.
    """

    answer: str | None
    error: str | None


class Worker:
    """A persistent program. Use :meth:`start`."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[WorkerReply]] = {}
        self._program: Program | None = None
        self._lines: asyncio.WriteTransport | None = None
        self._ended = _nothing

    async def start(self, start: Start) -> None:
        """Start the program."""
        read, write = os.pipe()
        file = os.fdopen(write, "wb", buffering=0)
        self._lines, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.Protocol, file)
        with undo_on_error(self._hang_up):
            self._program, self._ended = await start(read, self.receive)

    @property
    def program(self) -> Program:
        """The running program."""
        assert self._program is not None
        return self._program

    async def serve(self, job: Mapping[str, Any]) -> WorkerReply | None:
        """Send an episode and wait for its reply; None where the worker exited instead."""
        assert self._lines is not None
        answer: asyncio.Future[WorkerReply] = asyncio.get_running_loop().create_future()
        self._waiting[job["id"]] = answer
        self.program.quota.renew()
        exited: asyncio.Future[Any] = asyncio.ensure_future(self.program.wait())
        try:
            self._lines.write(json.dumps(job).encode() + b"\n")
            either: set[asyncio.Future[Any]] = {answer, exited}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            exited.cancel()
            del self._waiting[job["id"]]

    async def end(self) -> Exit:
        """Kill the program with its tree."""
        try:
            return await self.program.end()
        finally:
            self._hang_up()
            self._ended()

    def _hang_up(self) -> None:
        # If the program closed its end, this end is closing already, and must not be closed again.
        if self._lines is not None and not self._lines.is_closing():
            self._lines.abort()

    def receive(self, line: bytes) -> None:
        """Handle a line of standard output; lines that are no reply to an episode are ignored."""
        if not line.lstrip().startswith(b"{"):
            return
        try:
            response = json.loads(line)
        except ValueError:
            return
        waiting = self._waiting.get(str(response.get("id"))) if isinstance(response, dict) else None
        if waiting is None or waiting.done() or not ({"answer", "error"} & response.keys()):
            return
        answer, error = response.get("answer"), response.get("error")
        waiting.set_result(WorkerReply(None if answer is None else str(answer), None if error is None else str(error)))


class Workers:
    """A pool of workers, started on demand.

    Args:
        count: Most workers at the same time.
    """

    def __init__(self, count: int, start: Start) -> None:
        self._slots = asyncio.Semaphore(count)
        self._start = start
        self._idle: list[Worker] = []

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Worker]:
        """Lend a worker. One that exited, or whose block raised, is not reused."""
        async with self._slots:
            worker = await self._take_worker()
            async with undo_on_error_async(worker.end):
                yield worker
            if worker.program.running:
                self._idle.append(worker)
            else:
                await worker.end()

    async def close(self) -> None:
        """Stop the idle workers."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(worker.end() for worker in idle))

    async def _take_worker(self) -> Worker:
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
