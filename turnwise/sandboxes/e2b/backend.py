"""The E2B backend: sandboxes in E2B's cloud."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import e2b

from turnwise.errors import ConfigError, SandboxError, SandboxUnavailable
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxBackend, SandboxSpec
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
    """Sandboxes in E2B's cloud; ConfigError for invalid values.

    Args:
        template: Default template; None: E2B's.
        api_key_env: The environment variable that holds the API key.
        user: Default user of commands, existing in the template.
        lifetime: Seconds until E2B kills a sandbox that its host stopped refreshing.
        api_url: URL of the API, instead of E2B's.
        sandbox_url: URL of sandboxes, instead of E2B's.
        http_version: ``1.1`` or ``2``; None: the SDK's choice.
        request_timeout: Seconds per request.
    """

    name: ClassVar[str] = "e2b"
    capabilities: ClassVar[Capabilities] = _CAPABILITIES

    def __init__(
        self,
        template: str | None = None,
        api_key_env: str = "E2B_API_KEY",
        user: str = "user",
        lifetime: int = 300,
        api_url: str | None = None,
        sandbox_url: str | None = None,
        http_version: str | None = None,
        request_timeout: float = 60.0,
    ) -> None:
        if lifetime < 15:
            raise ConfigError(
                f"sandbox.config.lifetime is {lifetime} s: it must be at least 15, so that it can be renewed in time"
            )
        if http_version not in {None, "1.1", "2"}:
            raise ConfigError(f"sandbox.config.http_version is {http_version!r}: it must be '1.1' or '2'")
        if not request_timeout > 0:
            raise ConfigError(f"sandbox.config.request_timeout is {request_timeout!r}: it must be more than 0 seconds")
        self.template = template
        self.user = user
        self.lifetime = lifetime
        self._key_env = api_key_env
        options = {"api_url": api_url, "sandbox_url": sandbox_url, "http_version": http_version}
        self._options = {name: value for name, value in options.items() if value is not None}
        self._timeout = request_timeout
        self.snapshots: set[str] = set()

    @property
    def access(self) -> dict[str, Any]:
        """Common arguments of the SDK's calls; SandboxUnavailable without an API key."""
        key = os.environ.get(self._key_env)
        if not key:
            raise SandboxUnavailable(
                f"the environment variable {self._key_env} holds no E2B API key: set it, or name another variable in "
                "sandbox.config.api_key_env"
            )
        return {"api_key": key, "request_timeout": self._timeout, **self._options}

    def metadata(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the ownership metadata of a sandbox."""
        return {**labels, _MACHINE: _machine_id(), _HOST: f"{os.getpid()}-{start_time(os.getpid()) or ''}"}

    async def create(self, template: str | None, *, labels: Mapping[str, str], network: bool) -> e2b.AsyncSandbox:
        """Create a sandbox of a template or a snapshot; None is E2B's default."""
        return await e2b.AsyncSandbox.create(
            template=template,
            timeout=self.lifetime,
            metadata=self.metadata(labels),
            allow_internet_access=network,
            **self.access,
        )

    async def probe(self) -> Capabilities:
        """Check the API key."""
        with sdk_errors("list"):
            await e2b.AsyncSandbox.list(limit=1, **self.access).next_items()
        return self.capabilities

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox."""
        return E2BSandbox(spec, self)

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot."""
        self.snapshots.discard(snapshot)
        with sdk_errors(snapshot):
            await e2b.AsyncSandbox.delete_snapshot(snapshot, **self.access)

    async def reap(self) -> int:
        """Kill sandboxes of dead processes of this machine."""
        reaped = 0
        with sdk_errors("list"):
            query = e2b.SandboxQuery(metadata={_MACHINE: _machine_id()})
            pages = e2b.AsyncSandbox.list(query=query, **self.access)
            while pages.has_next:
                for sandbox in await pages.next_items():
                    pid, _, start = (sandbox.metadata or {}).get(_HOST, "").partition("-")
                    if pid.isdigit() and (start_time(int(pid)) or "") != start:
                        reaped += await e2b.AsyncSandbox.kill(sandbox.sandbox_id, **self.access)
        return reaped

    async def close(self) -> None:
        """Remove all snapshots."""
        for name in list(self.snapshots):
            with contextlib.suppress(SandboxError):
                await self.drop_snapshot(name)


def _machine_id() -> str:
    """Return an id of this machine's boot and pid namespace (containers of one machine differ)."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{uuid.getnode():x}"
