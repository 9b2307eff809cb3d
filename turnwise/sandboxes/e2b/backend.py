"""The E2B backend: sandboxes in E2B's cloud."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any, ClassVar, Final

import e2b

from turnwise.errors import SandboxError
from turnwise.sandboxes.config import read_options
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxBackend, SandboxSpec
from turnwise.sandboxes.e2b.account import E2BAccount, E2BOptions
from turnwise.sandboxes.e2b.command import sdk_errors
from turnwise.sandboxes.e2b.sandbox import E2BSandbox
from turnwise.sandboxes.process_identity import start_time

_MACHINE: Final = "turnwise_machine"
_HOST: Final = "turnwise_host"
_CAPABILITIES: Final = Capabilities(
    isolation="e2b",
    memory=False,
    pids=False,
    disk=False,
    kernel=False,
    survives_host=True,
    fork_processes=True,
    expose=False,
    notes=(
        "memory, processors and disk are those of the template, not those of limits",
        "limits.pids, file_size, open_files and cpu_seconds are rlimits; a user that may use sudo escapes them",
        "the kernel is the sandbox's own: an attack on it stays inside",
        "nothing of this machine can be exposed to a sandbox that runs elsewhere",
    ),
)


class E2BBackend(SandboxBackend):
    """Sandboxes in E2B's cloud; ``options`` are the keys of :class:`E2BOptions`, ConfigError for wrong ones."""

    name: ClassVar[str] = "e2b"

    def __init__(self, **options: Any) -> None:
        metadata = {_MACHINE: _machine_id(), _HOST: f"{os.getpid()}-{start_time(os.getpid()) or ''}"}
        self._account = E2BAccount(read_options(E2BOptions, self.name, options), _CAPABILITIES, metadata)

    async def probe(self) -> Capabilities:
        """Check the API key."""
        with sdk_errors("list"):
            await e2b.AsyncSandbox.list(limit=1, **self._account.access).next_items()
        return _CAPABILITIES

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox."""
        return E2BSandbox(spec, self._account)

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot."""
        self._account.snapshots.discard(snapshot)
        with sdk_errors(snapshot):
            await e2b.AsyncSandbox.delete_snapshot(snapshot, **self._account.access)

    async def reap(self) -> int:
        """Kill sandboxes of dead processes of this machine."""
        reaped = 0
        with sdk_errors("list"):
            query = e2b.SandboxQuery(metadata={_MACHINE: _machine_id()})
            pages = e2b.AsyncSandbox.list(query=query, **self._account.access)
            while pages.has_next:
                for sandbox in await pages.next_items():
                    pid, _, start = (sandbox.metadata or {}).get(_HOST, "").partition("-")
                    if pid.isdigit() and (start_time(int(pid)) or "") != start:
                        reaped += await e2b.AsyncSandbox.kill(sandbox.sandbox_id, **self._account.access)
        return reaped

    async def close(self) -> None:
        """Remove all snapshots."""
        for name in list(self._account.snapshots):
            with contextlib.suppress(SandboxError):
                await self.drop_snapshot(name)


def _machine_id() -> str:
    """Return an id of this machine's boot and pid namespace (containers of one machine differ)."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{uuid.getnode():x}"
