"""Sandbox backends with one protection removed, and ones whose sandboxes reach a gateway session."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from support.chat.model_dirs import renderer_for
from turnwise.gateway.local import LocalGateway, SessionEndpoint
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.sandboxes import Capabilities, Sandbox, SandboxBackend, SandboxSpec
from turnwise.sandboxes.docker import DockerBackend
from turnwise.sandboxes.local import LocalBackend
from turnwise.types import SamplingParams


def _shared_files(host: dict[str, Any]) -> None:
    # The checker plants its files below one of these folders; the sandbox's own /tmp is removed.
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
"""How each opening changes a container's settings."""


class OpenedDocker(DockerBackend):
    """A docker backend with openings that claims full isolation, so that a successful attack is an escape.

    Args:
        opened: Names of :data:`OPENINGS`; ``environment`` passes on the host's variables, ``reaper`` omits the
            reaper, so that the containers of a killed host stay.
        config: Of the docker backend.
    """

    def __init__(self, opened: Sequence[str], **config: Any) -> None:
        super().__init__(**config)
        self._opened = frozenset(opened)
        pool = self._pool
        original = pool.settings

        async def opened_settings(spec: SandboxSpec, sandbox: str) -> dict[str, Any]:
            settings = await original(spec, sandbox)
            for name in sorted(self._opened & OPENINGS.keys()):
                OPENINGS[name](settings["HostConfig"])
            return settings

        pool.settings = opened_settings  # type: ignore[method-assign]
        if "reaper" in self._opened:
            pool._start_reaper = _no_reaper  # type: ignore[method-assign]

    async def probe(self) -> Capabilities:
        capabilities = await super().probe()
        self._pool.capabilities = replace(capabilities, network=True, kernel=True, processes=True, filesystem=True)
        return self._pool.capabilities

    def make(self, spec: SandboxSpec) -> Sandbox:
        if "environment" in self._opened:
            spec = replace(spec, env={**os.environ, **spec.env, "PATH": "/usr/local/bin:/bin"})
        return super().make(spec)


async def _no_reaper() -> None:
    pass


class _ExposedBackend(SandboxBackend):
    """A backend whose sandboxes reach a gateway session.

    Attributes:
        opened: Number of sandboxes of this class that reach a session.
        endpoint: The session that they reach, once opened.
    """

    opened: ClassVar[int] = 0

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.endpoint: SessionEndpoint | None = None
        self._gateway = LocalGateway(renderer_for("qwen3"), context_length=4000)

    def make(self, spec: SandboxSpec) -> Sandbox:
        sandbox = super().make(spec)
        start = sandbox.start

        async def start_and_open() -> None:
            await start()
            await self._open(sandbox)

        sandbox.start = start_and_open  # type: ignore[method-assign]
        return sandbox

    async def close(self) -> None:
        if self.endpoint is not None:
            # No attack made a model call or set a reward.
            assert (self.endpoint.entry.session.turns, self.endpoint.entry.rewards) == (0, [])
            await self._gateway.shut(self.endpoint)
        await self._gateway.close()
        await super().close()

    async def _open(self, sandbox: Sandbox) -> None:
        if self.endpoint is None:
            renderer = renderer_for("qwen3")
            client = ScriptedClient(renderer, lambda _: "Yes.")
            limits = SessionLimits(context_length=4000)
            session = Session(client, renderer, id="attacked", limits=limits, params=SamplingParams())
            self.endpoint = await self._gateway.open(session)
        await self.endpoint.serve_at(await sandbox.listen())
        type(self).opened += 1


class ExposedLocal(_ExposedBackend, LocalBackend):
    """Local sandboxes that reach a gateway session."""


class ExposedDocker(_ExposedBackend, DockerBackend):
    """Containers that reach a gateway session."""
