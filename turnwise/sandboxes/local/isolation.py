"""What a machine gives to hold sandboxes back with, as facts that plans are made from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from turnwise.sandboxes.core import SandboxLimits

Isolation = Literal["bubblewrap", "landlock", "plain"]
CGROUPS: Final = Path("/sys/fs/cgroup")
RESERVE: Final = 16
"""Processes on top of what commands may have, for the agent and those that serve one request each."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Where this process may make control groups.

    Attributes:
        memory: The folder in whose groups memory is bounded; None where that is not possible.
        pids: The same of processes.
        cpu: The same of processor time.
        unified: Whether it is the kernel's second version, with one folder for all.
    """

    memory: Path | None = None
    pids: Path | None = None
    cpu: Path | None = None
    unified: bool = False

    def folders(self) -> list[Path]:
        """Return the folders, each once."""
        return list(dict.fromkeys(each for each in (self.memory, self.pids, self.cpu) if each is not None))

    def plan(self, host: str, name: str, limits: SandboxLimits, reserve: int = RESERVE) -> list[dict[str, Any]]:
        """Return the groups of one sandbox: where, and what is written into which file (and whether it must be)."""
        files: dict[Path, list[tuple[str, int | str, bool]]] = {}
        # What lies in the sandbox's files lies in memory, and the agent's own few megabytes count, too.
        if self.memory is not None:
            amount = limits.memory
            own = files.setdefault(self.memory, [])
            if self.unified:
                own += [("memory.max", amount, True), ("memory.swap.max", 0, False), ("memory.oom.group", 0, False)]
            else:
                own += [("memory.limit_in_bytes", amount, True), ("memory.memsw.limit_in_bytes", amount, False)]
        if self.pids is not None:
            files.setdefault(self.pids, []).append(("pids.max", limits.pids + reserve, True))
        if self.cpu is not None and limits.cpus is not None:
            period = 100_000
            quota = max(1000, int(limits.cpus * period))
            own = files.setdefault(self.cpu, [])
            if self.unified:
                own.append(("cpu.max", f"{quota} {period}", True))
            else:
                own += [("cpu.cfs_period_us", period, True), ("cpu.cfs_quota_us", quota, True)]
        names = {"memory": self.memory, "pids": self.pids, "cpu": self.cpu} if self.unified else {}
        controllers = [controller for controller, folder in names.items() if folder is not None]
        return [
            {"path": str(folder / host / name), "limits": wanted, "controllers": controllers}
            for folder, wanted in files.items()
        ]


def find_groups(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Groups:
    """Return where this process may make control groups.

    Args:
        root: Where they are mounted.
        own: The file that says which this process is in.
    """
    found: dict[str, Path] = {}
    unified: str | None = None
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return Groups()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            unified = path
        for controller in controllers.split(","):
            if controller in ("memory", "pids", "cpu"):
                place = _writable(root / controller, path)
                if place is not None:
                    found[controller] = place
    if found:
        return Groups(found.get("memory"), found.get("pids"), found.get("cpu"))
    return Groups() if unified is None else _unified(root, unified)


def _writable(mount: Path, path: str) -> Path | None:
    """Return the folder of a controller's group, or the mount's own where that is not seen here."""
    for place in (mount / path.lstrip("/"), mount):
        if (place / "cgroup.procs").exists() and os.access(place, os.W_OK):
            return place
    return None


def _unified(root: Path, path: str) -> Groups:
    """Return the nearest group above whose children may be bounded.

    In the second version a group that has processes cannot bound its children (the root aside), so it is the group's
    nearest parent that already bounds those that it has.
    """
    here = root / path.lstrip("/")
    while here.is_relative_to(root):
        try:
            given = (here / "cgroup.subtree_control").read_text().split()
        except OSError:
            given = []
        if "memory" in given and "pids" in given and os.access(here, os.W_OK):
            return Groups(here, here, here if "cpu" in given else None, unified=True)
        here = here.parent
    return Groups()


@dataclass(frozen=True, slots=True)
class IsolationLevel:
    """One way to hold a sandbox back, as it works on this machine.

    Attributes:
        isolation: Its name.
        uid: The user that sandboxes run as, where this process may choose (root); None: its own.
        stage: Where a private file system is mounted before a start: ``root``, in a mount namespace of the launcher's
            making; ``user``, in a user namespace; None: nowhere, files lie in the state folder.
        overlay: Whether a workspace is seen copy-on-write; else it is copied.
        groups: The control groups that there are.
        without: Containments that are switched off, for tests that show what they are good for.
        notes: What it does not hold back on this machine, in words.
    """

    isolation: Isolation
    uid: int | None = None
    stage: Literal["root", "user"] | None = None
    overlay: bool = False
    groups: Groups = Groups()
    without: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
