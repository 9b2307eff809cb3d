"""Whose a container is, and whether its host still lives.

Owns: :class:`Owner`, the labels that name the host of a container, and :func:`is_left`, which tells from them what a
dead host left. Refuses: asking the engine and removing anything.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SANDBOX: Final = "turnwise.sandbox"
OWNER: Final = "turnwise.owner"
SNAPSHOT: Final = "turnwise.snapshot"
_BOOT: Final = "turnwise.boot"
_NAMESPACE: Final = "turnwise.pid_namespace"
_PID: Final = "turnwise.pid"
_STARTED: Final = "turnwise.pid_started"
_CREATED: Final = "turnwise.created"
_EXPIRES: Final = "turnwise.expires"
RESERVED: Final = "turnwise."
"""What labels of ours begin with."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A host process, told apart from every other that had its number, on this machine or another.

    Attributes:
        token: Names one backend of the process.
        boot: Since when the machine runs, as a random word.
        namespace: In which its number counts.
        pid: Its number.
        started: When it started, in ticks since the boot.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(8))
    boot: str = field(default_factory=lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    namespace: str = field(default_factory=lambda: os.readlink("/proc/self/ns/pid"))
    pid: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: pid_started(os.getpid()) or "")

    def labels(self, ttl: float) -> dict[str, str]:
        """Return the labels of what it makes now, to be kept for so many seconds at most."""
        now = time.time()
        return {
            OWNER: self.token,
            _BOOT: self.boot,
            _NAMESPACE: self.namespace,
            _PID: str(self.pid),
            _STARTED: self.started,
            _CREATED: f"{now:.0f}",
            _EXPIRES: f"{now + ttl:.0f}",
        }


def pid_started(pid: int) -> str | None:
    """Return when a process started, in ticks since the boot; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def is_left(
    labels: Mapping[str, str],
    now: float,
    here: Owner,
    started: Callable[[int], str | None] = pid_started,
) -> bool:
    """Tell whether the host of something with these labels is dead, or its time over.

    A host whose processes cannot be seen from here (another machine, another container) counts as alive until then.

    Args:
        labels: Of a container or an image.
        now: The time.
        here: Who looks.
        started: Tells when a process started.
    """
    if OWNER not in labels or labels[OWNER] == here.token:
        return False
    expires, pid = labels.get(_EXPIRES, ""), labels.get(_PID, "")
    if expires.isdigit() and now > int(expires):
        return True
    seen = labels.get(_BOOT) == here.boot and labels.get(_NAMESPACE) == here.namespace
    return seen and pid.isdigit() and started(int(pid)) != labels.get(_STARTED)
