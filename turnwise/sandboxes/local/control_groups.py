"""Control groups that limit the memory, processes and processors of local sandboxes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turnwise.sandboxes.core import SandboxLimits

CGROUPS: Final = Path("/sys/fs/cgroup")
RESERVE: Final = 16
"""Processes beyond the limit of commands, for the agent and those that serve one request each."""


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Parent control groups by controller, None where unusable; ``unified`` is cgroup v2, with one folder for all."""

    memory: Path | None = None
    pids: Path | None = None
    cpu: Path | None = None
    unified: bool = False

    def folders(self) -> list[Path]:
        """Return the distinct folders."""
        return list(dict.fromkeys(folder for folder in (self.memory, self.pids, self.cpu) if folder is not None))

    def plan(self, host: str, name: str, limits: SandboxLimits, reserve: int = RESERVE) -> list[dict[str, Any]]:
        """Return the groups of one sandbox: paths, values by file, and whether each is mandatory."""
        files: dict[Path, list[tuple[str, int | str, bool]]] = {}
        # Files of the sandbox lie in memory and count, as do the agent's few megabytes.
        if self.memory is not None:
            amount = limits.memory
            settings = files.setdefault(self.memory, [])
            if self.unified:
                settings += [("memory.max", amount, True), ("memory.swap.max", 0, False)]
                settings.append(("memory.oom.group", 0, False))
            else:
                settings += [("memory.limit_in_bytes", amount, True), ("memory.memsw.limit_in_bytes", amount, False)]
        if self.pids is not None:
            files.setdefault(self.pids, []).append(("pids.max", limits.pids + reserve, True))
        if self.cpu is not None and limits.cpus is not None:
            period = 100_000
            quota = max(1000, int(limits.cpus * period))
            settings = files.setdefault(self.cpu, [])
            if self.unified:
                settings.append(("cpu.max", f"{quota} {period}", True))
            else:
                # A quota above that of a parent group is refused; the parent's quota holds then.
                settings += [("cpu.cfs_period_us", period, True), ("cpu.cfs_quota_us", quota, False)]
        names = {"memory": self.memory, "pids": self.pids, "cpu": self.cpu} if self.unified else {}
        controllers = [controller for controller, folder in names.items() if folder is not None]
        return [
            {"path": str(folder / host / name), "limits": settings, "controllers": controllers}
            for folder, settings in files.items()
        ]


def find_groups(root: Path = CGROUPS, cgroup_file: Path = Path("/proc/self/cgroup")) -> ControlGroups:
    """Find usable control groups below ``root``; ``cgroup_file`` is this process's cgroup file."""
    folders: dict[str, Path] = {}
    unified: str | None = None
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:
        return ControlGroups()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            unified = path
        for controller in controllers.split(","):
            if controller in ("memory", "pids", "cpu"):
                folder = _writable(root / controller, path)
                if folder is not None:
                    folders[controller] = folder
    if folders:
        return ControlGroups(folders.get("memory"), folders.get("pids"), folders.get("cpu"))
    return ControlGroups() if unified is None else _unified(root, unified)


def _writable(mount: Path, path: str) -> Path | None:
    """Return the folder of a v1 controller's group, or the mount root if the group is not visible."""
    for folder in (mount / path.lstrip("/"), mount):
        if (folder / "cgroup.procs").exists() and os.access(folder, os.W_OK):
            return folder
    return None


def _unified(root: Path, path: str) -> ControlGroups:
    """Return the nearest limiting ancestor in cgroup v2: groups with processes cannot limit children (but the root)."""
    folder = root / path.lstrip("/")
    while folder.is_relative_to(root):
        try:
            enabled = (folder / "cgroup.subtree_control").read_text().split()
        except OSError:
            enabled = []
        if "memory" in enabled and "pids" in enabled and os.access(folder, os.W_OK):
            return ControlGroups(folder, folder, folder if "cpu" in enabled else None, unified=True)
        folder = folder.parent
    return ControlGroups()
