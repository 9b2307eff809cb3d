"""Memory and CPU time of processes: resident set and its peak, of one process or with all its descendants.

The figures are those of ``/proc`` (``VmRSS``, ``VmHWM``; Linux). ``getrusage`` is not read there: after ``fork`` and
``exec`` its peak is at least the resident set of the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from turnwise.model.core import MemoryUse

_PROC = Path("/proc")
_PEAKS: dict[int, int] = {}
"""Largest peak that this process has read of itself, by its id: a fork begins anew."""


def process_memory(pid: int | None = None, *, device_peak: int = 0) -> MemoryUse:
    """Return the memory of a process (default: this one) and its descendants that run.

    The peak of several processes is the sum of theirs, which is at least that of the sum. A process that has ended
    counts nothing. Without ``/proc`` only this process is known, and its peak stands for both figures.
    """
    if not (_PROC / "self/status").is_file():
        if pid not in (None, os.getpid()):
            return MemoryUse(0, 0, device_peak)
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = usage if sys.platform == "darwin" else 1024 * usage
        return MemoryUse(peak, peak, device_peak)
    processes = [_read_self()] if pid is None else [_read(_PROC / str(member)) for member in _family(pid)]
    return MemoryUse(sum(process[0] for process in processes), sum(process[1] for process in processes), device_peak)


def _read_self() -> tuple[int, int]:
    """Return (resident, peak) of this process in bytes; the peak never falls, as what the kernel adds up late may."""
    resident, peak = _read(_PROC / "self")
    _PEAKS[os.getpid()] = peak = max(peak, _PEAKS.get(os.getpid(), 0))
    return resident, peak


def _read(process: Path) -> tuple[int, int]:
    """Return (resident, peak) in bytes; zeros for a process that has ended."""
    try:
        text = (process / "status").read_text()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("VmRSS:", "VmHWM:")))
    resident, peak = (1024 * int(fields.get(name, "0 kB").split()[0]) for name in ("VmRSS", "VmHWM"))
    # The kernel counts per thread and adds up later: the peak may be a little behind.
    return resident, max(resident, peak)


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        lists = [(thread / "children").read_text() for thread in (_PROC / str(pid) / "task").iterdir()]
    except OSError:
        return
    for child in " ".join(lists).split():
        yield from _family(int(child))


def group_cpu_seconds(leader: int) -> float:
    """Return the CPU seconds of the running processes of a process group; 0 without ``/proc``."""
    total = 0.0
    for status in _PROC.glob("[0-9]*/stat"):
        # The file of a process that ended meanwhile cannot be read.
        with contextlib.suppress(OSError):
            # From the state on: the name before it may hold spaces and parentheses.
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader:
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped by a signal or a debugger; False without ``/proc``."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


class _HeapInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2`` (malloc.h): ten sizes, of which ``fordblks`` is that of all free blocks."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def return_freed_memory(*, above: int = 0) -> bool:
    """Return freed blocks to the system; return whether any were.

    Between two trainings of a process: what the C library holds for the next step of one model lies in pieces that
    another one's tensors do not fill. And while a trainer waits for rollouts, or a server sleeps, on a machine that
    both share.

    Args:
        above: Bytes of freed blocks up to which they are kept.
    """
    try:
        library = ctypes.CDLL(None)
        if above:
            information = library.mallinfo2
            information.restype = _HeapInfo
            if information().fordblks <= above:
                return False
        return bool(library.malloc_trim(0))
    except (OSError, AttributeError, TypeError):
        # Another C library (or glibc before 2.33), or another system.
        return False
