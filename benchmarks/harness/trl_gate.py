"""What the two sides of a step benchmark have in common: a gate between steps.

A worker stops at the gate before every step until the benchmark lets it pass, so the steps of both sides can be
measured in turn although each side is one long run. Between two gates the CPU seconds of the worker and of all its
living descendants are counted by the kernel's own clocks of these processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)


class Gate:
    """Tells what each step cost, and waits for the word to go on.

    Made before anything else prints: what is written to standard output afterwards goes to standard error.
    """

    def __init__(self) -> None:
        self._report = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._began: tuple[float, float] | None = None

    def wait(self, **values: Any) -> None:
        """Report what ended here, and wait until the next step may begin (after the last one: until all is told)."""
        sample = values
        if self._began is not None:
            cpu, wall = self._began
            sample |= {"cpu_s": tree_cpu_seconds() - cpu, "wall_s": time.perf_counter() - wall}
        self._report.write(json.dumps(sample) + "\n")
        if not sys.stdin.readline():
            raise SystemExit("the benchmark is gone")
        self._began = tree_cpu_seconds(), time.perf_counter()

    def finish(self, **values: Any) -> None:
        """Report what the whole run was."""
        # Not that of getrusage: after fork and exec it is at least the resident set of the parent.
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
        peaks = peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        self._report.write(json.dumps({"peak_mb": [round(kilobytes / 1024) for kilobytes in peaks], **values}) + "\n")


def tree_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all its living descendants."""
    return time.process_time() + sum(_cpu_seconds(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _cpu_seconds(pid: int) -> float:
    clock = ctypes.c_int()
    error = _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, f"no CPU clock of process {pid}: {os.strerror(error)}")
    return time.clock_gettime(clock.value)
