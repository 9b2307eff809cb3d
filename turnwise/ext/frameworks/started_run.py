"""A training run that a server started: its process, its limit of CPU seconds, and its orderly end."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from turnwise.append_file import is_locked
from turnwise.inference.guard.turnwise_guard import child_environment

LOG: Final = "process.log"
"""File in the run's directory with what its process printed."""
_START_S, _END_S, _LOOK_S = 60.0, 120.0, 0.25
_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Have the kernel end this process as Ctrl-C does when its server dies, however that comes about."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process and its descendants, with those that ended and were waited for."""
    processes: dict[int, tuple[int, int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name of the program, in parentheses, may hold anything.
            fields = file.read_text().rpartition(")")[2].split()
            processes[int(file.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    total = 0
    for pid, (_, ticks) in processes.items():
        while pid in processes and pid != root:
            pid = processes[pid][0]
        total += ticks if pid == root else 0
    return total / os.sysconf("SC_CLK_TCK")


class StartedRun:
    """The process of ``turnwise train`` in a run's directory.

    Attributes:
        ended_by: ``stop`` or ``cpu_seconds`` where this class ended it.
    """

    def __init__(self, directory: Path, process: asyncio.subprocess.Process, cpu_limit: float | None) -> None:
        self.ended_by: str | None = None
        self._log = directory / LOG
        self._process = process
        self._watching = None if cpu_limit is None else asyncio.create_task(self._watch(cpu_limit))

    @classmethod
    async def start(cls, directory: Path, arguments: Sequence[str], folder: Path, cpu_limit: float | None) -> Self:
        """Start ``turnwise train`` with arguments in a folder, and wait until it works in its directory or has ended.

        ``cpu_limit`` are the CPU seconds of its processes together after which it is stopped.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (directory / LOG).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "turnwise", "train", *arguments),
                cwd=folder, env=child_environment(), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        run = cls(directory, process, cpu_limit)
        bound = time.monotonic() + _START_S
        while not is_locked(directory) and time.monotonic() < bound and not await run.wait(_LOOK_S):
            pass
        return run

    @property
    def status(self) -> int | None:
        """Exit status of the process; None while it works."""
        return self._process.returncode

    def log(self) -> str:
        """Return the end of what the process printed."""
        return self._log.read_text(errors="replace")[-2000:]

    async def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._process.wait()), seconds)
        return self.status is not None

    async def stop(self, reason: str = "stop") -> None:
        """End the run as Ctrl-C does, with a checkpoint of its last step; what does not end in time is killed."""
        if self.status is None:
            self.ended_by = reason
            self._process.terminate()
        if not await self.wait(_END_S):
            self._process.kill()
            await self._process.wait()

    async def _watch(self, limit: float) -> None:
        while not await self.wait(1.0):
            if cpu_seconds(self._process.pid) >= limit:
                await self.stop("cpu_seconds")
