"""The identity of a process: its pid and its start time, since a pid alone is reused."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> str | None:
    """Return a process's start time in ticks since boot; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
