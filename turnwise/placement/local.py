"""Processes on this machine: each in its own session, waited for by a thread, ended with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Protocol

from turnwise.append_file import private_directory, private_opener
from turnwise.model.core import MemoryUse
from turnwise.placement.core import Inherited, PlacedProcess, Placement, Program
from turnwise.placement.usage import group_cpu_seconds, process_memory


class Launched(Protocol):
    """A started process, such as a ``subprocess.Popen``; ``returncode`` is set by the thread that waits for it."""

    pid: int
    returncode: int | Any


class LocalProcess(PlacedProcess):
    """A process of this machine; a thread waits for it, for exact exit status and CPU time."""

    def __init__(self, popen: Launched, report: int, lifeline: int) -> None:
        self.pid = popen.pid
        self.host = None
        self.ended = asyncio.Event()
        self._report = report
        self._lifeline = lifeline
        self._popen = popen
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True).start()

    def _wait(self) -> None:
        # Until it is reaped, its id cannot be reused: the signal below reaches its process group and no other.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        # Popen did not see the end and must not wait for it either.
        self._popen.returncode = self.status = os.waitstatus_to_exitcode(status)
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.ended.set)

    async def report(self) -> bytes | None:
        """Read one line from its pipe and close it; None if the process ended without one."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        file = os.fdopen(self._report, "rb", buffering=0)
        self._report = -1
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        try:
            line = await reader.readline()
            if line.endswith(b"\n"):
                return line
            await self.ended.wait()
            return None
        finally:
            transport.close()

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def running_cpu(self) -> float:
        """Return the CPU seconds of its running process group."""
        return group_cpu_seconds(self.pid)

    async def memory(self) -> MemoryUse | None:
        """Return its memory and that of its descendants, without GPUs."""
        return process_memory(self.pid)

    def release(self) -> None:
        """Close its lifeline, which ends it if it still runs. Idempotent."""
        for descriptor in (self._report, self._lifeline):
            if descriptor >= 0:
                os.close(descriptor)
        self._report = self._lifeline = -1


class LocalPlacement(Placement):
    """Starts processes on this machine.

    Args:
        host: Address of this machine where it is a node of a cluster, for servers that others reach.

    Attributes:
        launcher: Starts a process, with the signature of ``subprocess.Popen``; see
            :class:`turnwise.inference.builtin.ForkedProcesses`.
    """

    launcher: ClassVar[Callable[..., Launched]] = subprocess.Popen

    def __init__(self, host: str | None = None) -> None:
        self._host = host

    async def start(self, program: Program) -> LocalProcess:
        """Start a process. Raises OSError."""
        return self._start(program)

    def _start(self, program: Program) -> LocalProcess:
        report_read, report_write = os.pipe()
        try:
            lifeline_read, lifeline_write = os.pipe()
        except OSError:
            os.close(report_read)
            os.close(report_write)
            raise
        try:
            private_directory(program.log_file.parent)
            with open(program.log_file, "ab", opener=private_opener) as log:
                popen = type(self).launcher(
                    program.command(Inherited(report_write, lifeline_read, self._host)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(report_write, lifeline_read),
                    start_new_session=True,
                    env=program.environment(os.environ),
                )
        except BaseException:  # whatever stops the start: the pipes are closed
            os.close(report_read)
            os.close(lifeline_write)
            raise
        finally:
            os.close(report_write)
            os.close(lifeline_read)
        return LocalProcess(popen, report_read, lifeline_write)


_CURRENT: ContextVar[Placement | None] = ContextVar("turnwise_placement", default=None)


def current_placement() -> Placement:
    """Return the placement of the run that this task belongs to; outside of runs this machine."""
    return _CURRENT.get() or LocalPlacement()


@contextlib.contextmanager
def placed_by(placement: Placement) -> Iterator[None]:
    """Have the processes that start in the context placed by ``placement``."""
    token = _CURRENT.set(placement)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def remove_orphans(root: Path, prefix: str) -> None:
    """Remove folders named ``prefix``, process id, ``-`` and more, of dead processes; shared memory outlives them."""
    for directory in root.glob(f"{prefix}*-*"):
        owner = directory.name.removeprefix(prefix).partition("-")[0]
        if not owner.isdecimal():
            continue
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(directory, ignore_errors=True)
        except PermissionError:
            # A process of another user has this process id.
            continue
