"""The docker backend: sandboxes as containers of one engine."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

from turnwise.errors import SandboxError, SandboxUnavailable
from turnwise.sandboxes.config import read_options
from turnwise.sandboxes.core import Capabilities, Mount, Sandbox, SandboxBackend, SandboxSpec
from turnwise.sandboxes.docker.ownership import OWNER, is_leftover
from turnwise.sandboxes.docker.pool import ContainerPool
from turnwise.sandboxes.docker.sandbox import DockerSandbox
from turnwise.sandboxes.docker.settings import DockerOptions

_SHARED_FILE: Final = "/run/turnwise-seen"
_INSPECT: Final = r"""
grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status
for path in /sys/class/net/*; do echo "Interface: ${path##*/}"; done
echo "Seen: $(cat /run/turnwise-seen 2>/dev/null)"
"""
_SHARED_TEXT: Final = "turnwise"
_FILTERING: Final = "2"


class DockerBackend(SandboxBackend):
    """Sandboxes that are containers.

    Args:
        options: The keys of :class:`~turnwise.sandboxes.docker.settings.DockerOptions`.

    Raises:
        ConfigError: An option is unknown, or its value is invalid.
        SandboxUnavailable: The engine's URL has an unsupported scheme.
    """

    name: ClassVar[str] = "docker"

    def __init__(self, **options: Any) -> None:
        self._pool = ContainerPool(read_options(DockerOptions, self.name, options))
        self._probing = asyncio.Lock()
        self._sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()

    async def probe(self) -> Capabilities:
        """Probe the engine with a container of the configured image."""
        async with self._probing:
            return await self._probe()

    async def _probe(self) -> Capabilities:
        pool = self._pool
        if pool.capabilities is not None:
            return pool.capabilities
        options = pool.options
        await pool.engine.connect()
        info: dict[str, Any] = await pool.engine.call(lambda client: client.info(), SandboxUnavailable) or {}
        runtimes = info.get("Runtimes") or {}
        if options.runtime is not None and options.runtime not in runtimes:
            raise SandboxUnavailable(
                f"sandbox.config.runtime is {options.runtime!r}, which the engine does not know (it knows "
                f"{', '.join(sorted(runtimes))}): add it to its daemon.json, or remove it"
            )
        pool.filtered = options.runtime is None and not options.cap_add and _takes_filter(info)
        await self._choose_files(await pool.images.resolve(options.image))
        disk = pool.in_memory or pool.bounded_layer
        enforced = {"memory": bool(info.get("MemoryLimit")), "pids": bool(info.get("PidsLimit")), "disk": disk}
        pool.capabilities = Capabilities(
            isolation="docker" if options.runtime is None else f"docker/{options.runtime}",
            siblings=options.user is None,
            expose=pool.local,
            notes=tuple(f"this engine does not enforce limits.{name}" for name, holds in enforced.items() if not holds),
            **enforced,
        )
        try:
            pool.capabilities = await self._inspect(pool.capabilities)
        except SandboxError as error:
            pool.capabilities = None
            raise SandboxUnavailable(f"no sandbox of image {options.image!r} works: {error}") from error
        return pool.capabilities

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox."""
        sandbox = DockerSandbox(spec, self._pool, self.probe)
        self._sandboxes.add(sandbox)
        return sandbox

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot."""
        await self._pool.drop_snapshot(snapshot)

    async def reap(self) -> int:
        """Remove leftovers of dead hosts on this engine."""
        pool, now, filters = self._pool, time.time(), {"label": [OWNER]}
        containers: list[dict[str, Any]] = (
            await pool.engine.call(lambda client: client.containers(all=True, filters=filters), SandboxUnavailable)
            or []
        )
        leftovers = [container for container in containers if is_leftover(container["Labels"], now, pool.owner)]
        for container in leftovers:
            await pool.remove_container(container["Id"])
        images: list[dict[str, Any]] = (
            await pool.engine.call(lambda client: client.images(filters=filters), SandboxUnavailable) or []
        )
        for container in images:
            if is_leftover(container["Labels"] or {}, now, pool.owner):
                await pool.remove_image(container["Id"])
        return len(leftovers)

    async def close(self) -> None:
        """Free the backend's resources, snapshots included."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)))
        await self._pool.close()

    async def _choose_files(self, image: str) -> None:
        """Test whether the engine bounds a container's layer; otherwise files are kept in tmpfs."""
        pool = self._pool
        if pool.options.files == "tmpfs":
            return
        settings = {
            "Image": image,
            "Entrypoint": ["/bin/sh"],
            "Labels": pool.owner.labels(60.0),
            "HostConfig": {"StorageOpt": {"size": "1G"}},
        }
        container = await pool.engine.call(
            lambda client: client.create_container_from_config(settings),
            SandboxUnavailable,
            "the check of the engine's storage failed",
            allowed=range(400, 600),
        )
        pool.bounded_layer = container is not None
        if container is not None:
            await pool.remove_container(container["Id"])
        pool.in_memory = pool.options.files == "auto" and not pool.bounded_layer

    async def _inspect(self, capabilities: Capabilities) -> Capabilities:
        pool, notes = self._pool, list(capabilities.notes)
        shared_file = pool.folder / "seen"
        shared_file.write_text(_SHARED_TEXT)
        shared_file.chmod(0o644)
        mounts = (Mount(shared_file, _SHARED_FILE),) if pool.local else ()
        sandbox = DockerSandbox(SandboxSpec(mounts=mounts), pool)
        try:
            try:
                await sandbox.start()
            except SandboxError:
                if not mounts:
                    raise
                # An engine behind a socket of this machine may still not see its files.
                pool.local = False
                sandbox = DockerSandbox(SandboxSpec(), pool)
                await sandbox.start()
            report = (await sandbox.exec(_INSPECT)).stdout.decode("utf-8", "replace")
            rows = [line.split(":", 1) for line in report.splitlines() if ":" in line]
            values = {name: value.strip() for name, value in rows}
            interfaces = {value.strip() for name, value in rows if name == "Interface"} - {"lo", "*"}
            pool.local = pool.local and values.get("Seen") == _SHARED_TEXT
            expose = pool.local and await self._can_listen(sandbox, notes)
        finally:
            await sandbox.close()
        if not pool.local:
            notes.append("the engine does not see files of this machine: no mounts, and nothing can be exposed")
        if interfaces:
            notes.append(f"without a network, a sandbox still sees {', '.join(sorted(interfaces))}")
        kernel = pool.options.runtime is not None or values.get("Seccomp") == _FILTERING
        if not kernel:
            notes.append("this engine filters no system calls (seccomp)")
        elif not pool.filtered and pool.options.runtime is None:
            kernel = False
            notes.append("the engine's own filter of system calls applies, which may leave AF_VSOCK and AF_ALG open")
        if pool.options.user is not None:
            notes.append(f"user is {pool.options.user} for all sandboxes: one can use up its pipes for the others")
        if pool.options.cap_add:
            kernel = False
            notes.append(f"it has capabilities: {', '.join(pool.options.cap_add)} (cap_add)")
        return replace(capabilities, network=not interfaces, kernel=kernel, expose=expose, notes=tuple(notes))

    async def _can_listen(self, sandbox: DockerSandbox, notes: list[str]) -> bool:
        try:
            (await sandbox.listen()).close()
        except SandboxError as error:
            notes.append(f"nothing can be exposed to it: {error}")
            return False
        return True


def _takes_filter(info: Mapping[str, Any]) -> bool:
    """Whether an engine has its built-in filter of system calls, which may leave sockets open, and takes another."""
    builtin = {"name=seccomp,profile=builtin", "name=seccomp,profile=default"}
    version = str(info.get("ServerVersion")).partition(".")[0]
    # Podman, of a lower version, takes a path only.
    return not builtin.isdisjoint(info.get("SecurityOptions") or ()) and version.isdigit() and int(version) > 16
