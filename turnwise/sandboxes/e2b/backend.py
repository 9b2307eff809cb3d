"""The E2B backend: sandboxes in E2B's cloud."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar, Final

import e2b

from turnwise.errors import SandboxError
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxBackend, SandboxSpec
from turnwise.sandboxes.e2b.account import HOST, MACHINE, E2BAccount, machine_id, process_start
from turnwise.sandboxes.e2b.command import sdk_errors
from turnwise.sandboxes.e2b.sandbox import E2BSandbox

CAPABILITIES: Final = Capabilities(
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
    """Sandboxes in E2B's cloud; ``options`` are those of :class:`~turnwise.sandboxes.e2b.account.E2BAccount`."""

    name: ClassVar[str] = "e2b"

    def __init__(self, **options: Any) -> None:
        self._account = E2BAccount(**options)

    async def probe(self) -> Capabilities:
        """Check the API key."""
        with sdk_errors("list"):
            await e2b.AsyncSandbox.list(limit=1, **self._account.access).next_items()
        return CAPABILITIES

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox."""
        return E2BSandbox(spec, self._account, CAPABILITIES)

    async def reap(self) -> int:
        """Kill sandboxes of dead processes of this machine."""
        reaped = 0
        with sdk_errors("list"):
            query = e2b.SandboxQuery(metadata={MACHINE: machine_id()})
            pages = e2b.AsyncSandbox.list(query=query, **self._account.access)
            while pages.has_next:
                for sandbox in await pages.next_items():
                    pid, _, start = (sandbox.metadata or {}).get(HOST, "").partition("-")
                    if pid.isdigit() and process_start(int(pid)) != start:
                        reaped += await e2b.AsyncSandbox.kill(sandbox.sandbox_id, **self._account.access)
        return reaped

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot."""
        await self._account.drop_snapshot(snapshot)

    async def close(self) -> None:
        """Remove all snapshots."""
        for name in list(self._account.snapshots):
            with contextlib.suppress(SandboxError):
                await self.drop_snapshot(name)
