"""The docker backend: sandboxes as containers of one engine."""

from __future__ import annotations

import asyncio
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from turnwise.errors import SandboxError, SandboxUnavailable
from turnwise.sandboxes.core import Capabilities, Mount, Sandbox, SandboxBackend, SandboxSpec
from turnwise.sandboxes.docker import engine as owner
from turnwise.sandboxes.docker.engine import DockerOptions
from turnwise.sandboxes.docker.pool import ContainerPool
from turnwise.sandboxes.docker.sandbox import DockerSandbox

_SEEN: Final = "/run/turnwise-seen"
_LOOK: Final = r"""
grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status
for each in /sys/class/net/*; do echo "Interface: ${each##*/}"; done
echo "Seen: $(cat /run/turnwise-seen 2>/dev/null)"
"""
_WORD: Final = "turnwise"
_FILTERING: Final = "2"


class DockerBackend(SandboxBackend):
    """Sandboxes that are containers.

    Args:
        options: The keys of :class:`~turnwise.sandboxes.docker.engine.DockerOptions`.

    Raises:
        ConfigError: One is unknown, or has a value that is none.
        SandboxUnavailable: The engine is reached in a way that is not spoken.
    """

    name: ClassVar[str] = "docker"

    def __init__(self, **options: Any) -> None:
        self._keeper = ContainerPool(DockerOptions.read(options))
        self._probing = asyncio.Lock()
        self._made: weakref.WeakSet[Sandbox] = weakref.WeakSet()

    async def probe(self) -> Capabilities:
        """Probe the engine with a container of the configured image."""
        async with self._probing:
            return await self._probe()

    async def _probe(self) -> Capabilities:
        keeper = self._keeper
        if keeper.capabilities is not None:
            return keeper.capabilities
        options = keeper.options
        await keeper.engine.connect()
        info: dict[str, Any] = await keeper.engine.call(lambda client: client.info(), SandboxUnavailable) or {}
        known = info.get("Runtimes") or {}
        if options.runtime is not None and options.runtime not in known:
            raise SandboxUnavailable(
                f"sandbox.config.runtime is {options.runtime!r}, which the engine does not know (it knows "
                f"{', '.join(sorted(known))}): add it to its daemon.json, or remove it"
            )
        await self._choose_files(await keeper.images.resolve(options.image))
        disk = keeper.in_memory or keeper.bounded_layer
        found = Capabilities(
            isolation="docker" if options.runtime is None else f"docker/{options.runtime}",
            memory=bool(info.get("MemoryLimit")),
            pids=bool(info.get("PidsLimit")),
            disk=disk,
            survives_host=False,
            expose=keeper.local,
        )
        unbound = [
            name for name, holds in (("memory", found.memory), ("pids", found.pids), ("disk", disk)) if not holds
        ]
        notes = [f"this engine does not enforce limits.{name}" for name in unbound]
        keeper.capabilities = replace(found, notes=tuple(notes))
        try:
            keeper.capabilities = await self._look(keeper.capabilities)
        except SandboxError as error:
            keeper.capabilities = None
            raise SandboxUnavailable(f"no sandbox of image {options.image!r} works: {error}") from error
        return keeper.capabilities

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox."""
        made = DockerSandbox(spec, self._keeper, self.probe)
        self._made.add(made)
        return made

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot."""
        await self._keeper.drop(snapshot)

    async def reap(self) -> int:
        """Remove leftovers of dead hosts on this engine."""
        keeper, now, chosen = self._keeper, time.time(), {"label": [owner.OWNER]}
        containers: list[dict[str, Any]] = (
            await keeper.engine.call(lambda client: client.containers(all=True, filters=chosen), SandboxUnavailable)
            or []
        )
        left = [each for each in containers if owner.is_left(each["Labels"], now, keeper.owner)]
        for each in left:
            await keeper.remove_container(each["Id"])
        images: list[dict[str, Any]] = (
            await keeper.engine.call(lambda client: client.images(filters=chosen), SandboxUnavailable) or []
        )
        for each in images:
            if owner.is_left(each["Labels"] or {}, now, keeper.owner):
                await keeper.remove_image(each["Id"])
        return len(left)

    async def close(self) -> None:
        """Free the backend's resources, snapshots included."""
        await asyncio.gather(*(each.close() for each in list(self._made)))
        await self._keeper.close()

    async def build(self, folder: Path, tag: str | None = None) -> str:
        """Build the image of a folder with a ``Dockerfile`` and return its name. Raises SandboxUnavailable."""
        return await self._keeper.images.build(folder, tag)

    async def import_root(self, source: Path, tag: str | None = None) -> str:
        """Import a root file system as an image and return its name. Raises SandboxUnavailable."""
        return await self._keeper.images.import_root(source, tag)

    async def _choose_files(self, image: str) -> None:
        """Test whether the engine bounds a container's layer; otherwise files are kept in tmpfs."""
        keeper = self._keeper
        if keeper.options.files == "tmpfs":
            return
        settings = {
            "Image": image,
            "Entrypoint": ["/bin/sh"],
            "Labels": keeper.owner.labels(60.0),
            "HostConfig": {"StorageOpt": {"size": "1G"}},
        }
        name = f"turnwise-bounded-{keeper.owner.token}"
        status, _ = await keeper.engine.status(
            lambda client: client.create_container_from_config(settings, name), "looking at the engine's storage failed"
        )
        keeper.bounded_layer = status == 0
        if keeper.bounded_layer:
            await keeper.remove_container(name)
        keeper.in_memory = keeper.options.files == "auto" and not keeper.bounded_layer

    async def _look(self, found: Capabilities) -> Capabilities:
        keeper, notes = self._keeper, list(found.notes)
        seen = keeper.folder / "seen"
        seen.write_text(_WORD)
        seen.chmod(0o644)
        mounts = (Mount(seen, _SEEN),) if keeper.local else ()
        probing = DockerSandbox(SandboxSpec(mounts=mounts), keeper)
        try:
            try:
                await probing.start()
            except SandboxError:
                if not mounts:
                    raise
                # An engine behind a socket of this machine may still have other files.
                keeper.local = False
                probing = DockerSandbox(SandboxSpec(), keeper)
                await probing.start()
            said = (await probing.exec(_LOOK)).stdout.decode("utf-8", "replace")
            rows = [line.split(":", 1) for line in said.splitlines() if ":" in line]
            values = {name: value.strip() for name, value in rows}
            interfaces = {value.strip() for name, value in rows if name == "Interface"} - {"lo", "*"}
            keeper.local = keeper.local and values.get("Seen") == _WORD
            expose = keeper.local and await self._may_listen(probing, notes)
        finally:
            await probing.close()
        if not keeper.local:
            notes.append("the engine does not see files of this machine: no mounts, and nothing can be exposed")
        if interfaces:
            notes.append(f"without a network, a sandbox still sees {', '.join(sorted(interfaces))}")
        kernel = keeper.options.runtime is not None or values.get("Seccomp") == _FILTERING
        if not kernel:
            notes.append("this engine filters no system calls (seccomp)")
        if keeper.options.cap_add:
            kernel = False
            notes.append(f"it has capabilities: {', '.join(keeper.options.cap_add)} (cap_add)")
        return replace(found, network=not interfaces, kernel=kernel, expose=expose, notes=tuple(notes))

    async def _may_listen(self, probing: DockerSandbox, notes: list[str]) -> bool:
        try:
            (await probing.listen()).close()
        except SandboxError as error:
            notes.append(f"nothing can be exposed to it: {error}")
            return False
        return True
