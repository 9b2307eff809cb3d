"""The processes of a container as the host sees them: those of one command, and killing them from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from turnwise.sandboxes.docker.scripts import ID_VARIABLE

_DEAD: Final = {"Z", "X"}


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A container process as seen on the host: start in ticks since boot, command id, whether all threads ended."""

    parent: int
    start_ticks: int
    name: str
    dead: bool = False


def list_processes(first: int) -> dict[int, ProcessInfo]:
    """Return the processes of a process's pid namespace by id. Raises OSError."""
    namespace = os.readlink(f"/proc/{first}/ns/pid")
    processes = {}
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") != namespace:
                continue
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            environment = _read_environment(pid).split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended, or another user's, which does not belong to the container
        variable = f"{ID_VARIABLE}=".encode()
        name = next(
            (
                assignment[len(variable) :].decode(errors="replace")
                for assignment in environment
                if assignment.startswith(variable)
            ),
            "",
        )
        processes[int(pid)] = ProcessInfo(
            int(fields[1]), int(fields[19]), name, fields[0] in _DEAD and int(fields[17]) <= 1
        )
    return processes


def _read_environment(pid: str) -> bytes:
    """Return a process's environment, which its first thread shows only until that thread ends. Raises OSError."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if environment := Path(f"/proc/{pid}/task/{thread}/environ").read_bytes():
                return environment
    return b""


def belonging_processes(
    processes: Mapping[int, ProcessInfo], first: int, name: str, since: int, concurrent: Collection[str]
) -> set[int]:
    """Return the pids of one command: descendants, and orphans that began after it.

    ``since`` is a time before its start, in ticks since boot; orphans of ``concurrent`` commands are excluded.
    """
    # A command's root process, started by the engine, has the parent of the first process, which none inside can fake.
    engine = processes[first].parent
    roots = [process for pid, process in processes.items() if pid != first and process.parent == engine]
    since = max([since, *(root.start_ticks for root in roots if root.name == name)])

    def belongs(pid: int) -> bool:
        at = pid
        while processes[at].parent in processes and processes[at].parent != first:
            at = processes[at].parent
        if processes[at].parent == first:
            return processes[at].start_ticks >= since and processes[at].name not in concurrent
        return processes[at].name == name

    return {pid for pid in processes if pid != first and not processes[pid].dead and belongs(pid)}


def kill_processes(first: int, name: str, since: int, concurrent: Collection[str], seconds: float) -> bool:
    """Kill a command's processes, all stopped first; return whether none is left within ``seconds``."""
    began = time.monotonic()
    stopped: set[int] = set()
    while time.monotonic() < began + seconds:
        try:
            processes = list_processes(first)
            if first not in processes:
                return False
            alive = belonging_processes(processes, first, name, since, concurrent)
            fresh = alive - stopped
            for pid in fresh or alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if fresh else signal.SIGKILL)
        except OSError:
            return False
        # Zombies are left until the first process reaps them.
        if not alive and not any(process.dead and process.parent == first for process in processes.values()):
            return True
        stopped |= fresh
    return False
