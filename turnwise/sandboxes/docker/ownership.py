"""Ownership labels of containers and images: which host process made them, and whether it still lives."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from turnwise.sandboxes.process_identity import start_time

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
"""Prefix of the labels above, which a spec may not use."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A host process, identified across reused pids and machines by token, boot id, pid namespace, pid and start."""

    token: str = field(default_factory=lambda: secrets.token_hex(8))
    boot: str = field(default_factory=lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    namespace: str = field(default_factory=lambda: os.readlink("/proc/self/ns/pid"))
    pid: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: start_time(os.getpid()) or "")

    def labels(self, ttl: float) -> dict[str, str]:
        """Return the owner labels of a new resource, with its maximum lifetime in seconds."""
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


def is_leftover(
    labels: Mapping[str, str], now: float, here: Owner, started: Callable[[int], str | None] = start_time
) -> bool:
    """Return whether the owner of a labelled resource is dead.

    An owner on another machine or in another pid namespace than ``here`` counts as alive until ``now`` is beyond the
    resource's lifetime. One that is visible ends that itself, by a clock that does not jump.
    """
    if OWNER not in labels or labels[OWNER] == here.token:
        return False
    expires, pid = labels.get(_EXPIRES, ""), labels.get(_PID, "")
    if labels.get(_BOOT) == here.boot and labels.get(_NAMESPACE) == here.namespace and pid.isdigit():
        return started(int(pid)) != labels.get(_STARTED)
    return expires.isdigit() and now > int(expires)
