"""The backend ``e2b``: the account, what its sandboxes hold back, and the reaper.

Owns: :class:`E2BBackend`. Refuses: one sandbox (``sandbox.py``).
"""

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
from turnwise.sandboxes.e2b.sandbox import E2BSandbox
from turnwise.sandboxes.e2b.sdk import mapped

_MACHINE: Final = "turnwise_machine"
_HOST: Final = "turnwise_host"

_CAPABILITIES: Final = Capabilities(
    isolation="e2b",
    memory=False,
    pids=False,
    disk=False,
    kernel=False,
    survives_host=True,
    expose=False,
    notes=(
        "memory, processors and disk are those of the template, not those of limits",
        "limits.pids, file_size, open_files and cpu_seconds are rlimits; a user that may use sudo escapes them",
        "the kernel inside is the sandbox's own: what is done to it stays inside",
        "nothing of this machine can be exposed to a sandbox that runs elsewhere",
    ),
)


class E2BBackend(SandboxBackend):
    """Sandboxes in E2B's cloud.

    Args:
        template: The template of sandboxes whose spec names no image; None: E2B's default.
        api_key_env: The environment variable that holds the API key.
        user: Who runs commands where the spec names nobody; a user of the template.
        lifetime: Seconds after which E2B ends a sandbox whose host does not answer for it any more; while it does, the
            end is put off.
        api_url: Where the API is, instead of E2B's own.
        sandbox_url: Where sandboxes are, instead of E2B's own.
        http_version: ``1.1`` or ``2``; None: the SDK's choice.
        request_timeout: Seconds that one request may take.

    Raises:
        ConfigError: A value that cannot be used.
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
            raise ConfigError(f"sandbox.config.lifetime is {lifetime} s: give at least 15, for it is renewed in time")
        if http_version not in {None, "1.1", "2"}:
            raise ConfigError(f"sandbox.config.http_version is {http_version!r}: it is '1.1' or '2'")
        if not request_timeout > 0:
            raise ConfigError(f"sandbox.config.request_timeout is {request_timeout!r}: it must be more than 0 seconds")
        self.template = template
        self.user = user
        self.lifetime = lifetime
        self._key_env = api_key_env
        given = {"api_url": api_url, "sandbox_url": sandbox_url, "http_version": http_version}
        self._given = {name: value for name, value in given.items() if value is not None}
        self._timeout = request_timeout
        self._snapshots: set[str] = set()

    @property
    def access(self) -> dict[str, Any]:
        """What every call of the SDK is given.

        Raises:
            SandboxUnavailable: There is no API key.
        """
        key = os.environ.get(self._key_env)
        if not key:
            raise SandboxUnavailable(
                f"the environment variable {self._key_env} holds no E2B API key: set it, or name another variable in "
                "sandbox.config.api_key_env"
            )
        return {"api_key": key, "request_timeout": self._timeout, **self._given}

    def metadata(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return what a sandbox is marked with, so that it is told whose it is."""
        return {**labels, _MACHINE: _machine(), _HOST: f"{os.getpid()}-{_started(os.getpid())}"}

    async def probe(self) -> Capabilities:
        """Ask E2B whether it takes the key."""
        with mapped("list"):
            await e2b.AsyncSandbox.list(limit=1, **self.access).next_items()
        return self.capabilities

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox that was not started."""
        return E2BSandbox(spec, self)

    def keep(self, snapshot: str) -> str:
        """Note a snapshot, which is removed with the backend."""
        self._snapshots.add(snapshot)
        return snapshot

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot."""
        self._snapshots.discard(snapshot)
        with mapped(snapshot):
            await e2b.AsyncSandbox.delete_snapshot(snapshot, **self.access)

    async def reap(self) -> int:
        """Kill the sandboxes that dead processes of this machine left running."""
        reaped = 0
        with mapped("list"):
            query = e2b.SandboxQuery(metadata={_MACHINE: _machine()})
            pages = e2b.AsyncSandbox.list(query=query, **self.access)
            while pages.has_next:
                for found in await pages.next_items():
                    pid, _, started = (found.metadata or {}).get(_HOST, "").partition("-")
                    if pid.isdigit() and _started(int(pid)) != started:
                        reaped += await e2b.AsyncSandbox.kill(found.sandbox_id, **self.access)
        return reaped

    async def close(self) -> None:
        """Remove the snapshots that were made."""
        for name in list(self._snapshots):
            with contextlib.suppress(SandboxError):
                await self.drop_snapshot(name)


def _machine() -> str:
    """Return what tells where this process has its number from everywhere else: the machine, since it was started, and
    the namespace of processes (of two containers of one machine, one sees no process of the other).
    """
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{uuid.getnode():x}"


def _started(pid: int) -> str:
    """Return when a process of this machine was started, in ticks; empty where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
