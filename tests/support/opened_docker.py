"""Docker sandboxes that lack one of the things that hold them back, for tests that show that it is this which does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from turnwise.sandboxes import Capabilities, Sandbox, SandboxSpec
from turnwise.sandboxes.docker import DockerBackend


def _shared_files(host: dict[str, Any]) -> None:
    # The examination plants what it attacks below one of these; what the sandbox has of its own at /tmp goes.
    host.get("Tmpfs", {}).pop("/tmp", None)
    host["Mounts"] += [
        {"Type": "bind", "Source": path, "Target": path, "ReadOnly": False} for path in ("/var/tmp", "/tmp")
    ]


def _kernel_files(host: dict[str, Any]) -> None:
    host.update(MaskedPaths=[], ReadonlyPaths=[])


def _a_device(host: dict[str, Any]) -> None:
    path = "/dev/kmsg"
    host["Devices"] = [{"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "r"}]


OPENINGS: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "host processes": lambda host: host.update(PidMode="host"),
    "host files": _shared_files,
    "system calls": lambda host: host.update(SecurityOpt=["seccomp=unconfined"]),
    "kernel files": _kernel_files,
    "device": _a_device,
}
"""What each changes of what the engine is asked for."""


class OpenedDocker(DockerBackend):
    """As above. It promises to hold everything back, so that what gets through is an escape.

    Args:
        opened: Which of :data:`OPENINGS`; and ``environment``, which hands on the host's; and ``guardian``, without
            whom nobody cleans up after a host that was killed.
        config: Of the docker backend.
    """

    def __init__(self, opened: Sequence[str], **config: Any) -> None:
        super().__init__(**config)
        self._opened = frozenset(opened)
        keeper = self._keeper
        asked = keeper.settings

        async def settings(spec: SandboxSpec, sandbox: str) -> dict[str, Any]:
            made = await asked(spec, sandbox)
            for name in sorted(self._opened & OPENINGS.keys()):
                OPENINGS[name](made["HostConfig"])
            return made

        keeper.settings = settings  # type: ignore[method-assign]
        if "guardian" in self._opened:
            keeper._guard = _nobody  # type: ignore[method-assign]

    async def probe(self) -> Capabilities:
        found = await super().probe()
        self._keeper.capabilities = replace(found, network=True, kernel=True, processes=True, filesystem=True)
        return self._keeper.capabilities

    def make(self, spec: SandboxSpec) -> Sandbox:
        if "environment" in self._opened:
            spec = replace(spec, env={**os.environ, **spec.env, "PATH": "/usr/local/bin:/bin"})
        return super().make(spec)


async def _nobody() -> None:
    pass
