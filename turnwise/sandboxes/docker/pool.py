"""The shared state of one docker backend: its containers' settings, images, snapshots and reaper process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any, Final

from turnwise.errors import SandboxError, SandboxUnavailable
from turnwise.sandboxes.core import Capabilities, SandboxSpec
from turnwise.sandboxes.docker.engine import Engine
from turnwise.sandboxes.docker.images import Images
from turnwise.sandboxes.docker.ownership import OWNER, SANDBOX, SNAPSHOT, Owner
from turnwise.sandboxes.docker.settings import DockerOptions, container_settings
from turnwise.sandboxes.users import SandboxUsers

_ABSENT: Final = (404, 409)
_REFUSED: Final = range(400, 600)
_REAPER_S: Final = 20.0
_LAYER_REPOSITORY: Final = "turnwise-snapshot"
_ARCHIVE_PREFIX: Final = "turnwise-files"


class ContainerPool:
    """Shared state of one backend's sandboxes.

    Attributes:
        in_memory: Whether workdir, /tmp and home are tmpfs.
        bounded_layer: Whether the engine bounds a container's layer.
        local: Whether the engine sees this machine's files.
        filtered: Whether containers get the system call filter of local sandboxes.
        capabilities: Probed capabilities, or None.
    """

    def __init__(self, options: DockerOptions) -> None:
        self.options = options
        self.engine = Engine(options.url, options.concurrency)
        self.images = Images(self.engine, options.pull)
        self.owner = Owner()
        self.in_memory = options.files == "tmpfs"
        self.bounded_layer = False
        self.local = self.engine.url.startswith(("unix://", "http+unix://"))
        self.filtered = False
        self.capabilities: Capabilities | None = None
        self._folder: Path | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._starting_reaper = asyncio.Lock()
        self._snapshots: dict[str, str] = {}
        self._users = SandboxUsers()
        self._owners: dict[str, int] = {}
        self._workdir_has_files: dict[tuple[str, str], bool] = {}

    @property
    def folder(self) -> Path:
        """The backend's folder on this machine, created on first access."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="turnwise-docker-"))
        return self._folder

    async def settings(self, spec: SandboxSpec, sandbox: str) -> dict[str, Any]:
        """Return a container's settings and make sure the reaper runs. Raises SandboxUnavailable."""
        await self._start_reaper()
        if spec.snapshot is None:
            image = await self.images.resolve(spec.image or self.options.image)
            if self.in_memory:
                await self._check_workdir(image, spec.workdir)
        elif spec.snapshot in self._snapshots:
            image = self._snapshots[spec.snapshot]
        else:
            raise SandboxUnavailable(
                f"there is no snapshot {spec.snapshot!r} of this backend: it was dropped, or closed"
            )
        return container_settings(
            spec,
            self.options,
            image,
            labels={SANDBOX: sandbox, **self.owner.labels(self.options.ttl)},
            in_memory=self.in_memory,
            bounded_layer=self.bounded_layer,
            local=self.local,
            filtered=self.filtered,
        )

    def take_user(self, sandbox: str, snapshot: str | None) -> str:
        """Return the user of a sandbox whose spec names none: one that owns a layer's files, or one of its own."""
        return self.options.user or str(self._users.take(sandbox, self._owners.get(snapshot or "")))

    async def save_snapshot(self, sandbox: str, image: str, user: int, packed: IO[bytes] | None) -> str:
        """Save a container's layer with the files of a user, or an archive of them, as a snapshot; return its name."""
        suffix = os.urandom(8).hex()
        if packed is not None:
            name = f"{_ARCHIVE_PREFIX}:{suffix}"

            def write() -> None:
                with self._archive_path(name).open("wb") as file:
                    shutil.copyfileobj(packed, file, 2**20)

            await asyncio.to_thread(write)
            self._snapshots[name] = image
            return name
        name = f"{_LAYER_REPOSITORY}:{suffix}"
        labels = {SNAPSHOT: sandbox, **self.owner.labels(self.options.ttl)}
        self._snapshots[name] = name
        self._owners[name] = user
        await self.engine.call(
            lambda client: client.commit(
                sandbox,
                repository=_LAYER_REPOSITORY,
                tag=suffix,
                changes=[f'LABEL {key}="{value}"' for key, value in labels.items()],
            ),
            what="the sandbox has ended, or its files cannot be committed",
        )
        return name

    def archive_of(self, snapshot: str) -> Path | None:
        """Return the archive of a snapshot whose files were in memory, or None."""
        path = self._archive_path(snapshot)
        return path if snapshot.startswith(_ARCHIVE_PREFIX) and path.is_file() else None

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; one in use is removed when the backend closes."""
        if self._snapshots.get(snapshot) == snapshot and not await self.remove_image(snapshot):
            return
        self._snapshots.pop(snapshot, None)
        self._owners.pop(snapshot, None)
        if snapshot.startswith(_ARCHIVE_PREFIX):
            self._archive_path(snapshot).unlink(missing_ok=True)

    async def remove_container(self, container: str) -> None:
        """Remove a container, running or not; a missing one is ignored."""
        await self.engine.call(
            lambda client: client.remove_container(container, force=True, v=True),
            what=f"container {container} was not removed",
            allowed=_ABSENT,
        )
        self._users.release(container)

    async def remove_image(self, image: str) -> bool:
        """Remove an image; return whether the engine did so."""
        answer = await self.engine.call(
            lambda client: client.remove_image(image, force=True),
            SandboxUnavailable,
            f"image {image} was not removed",
            allowed=_REFUSED,
        )
        return answer is not None

    async def close(self) -> None:
        """Free everything; idempotent."""
        await self.images.close()
        for snapshot in reversed(list(self._snapshots)):
            with contextlib.suppress(SandboxError):
                await self.drop_snapshot(snapshot)
        self._snapshots.clear()
        process, self._reaper = self._reaper, None
        if process is not None and process.stdin is not None:
            # As after this process's death it removes what remains; here its end is awaited.
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _REAPER_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        await self.engine.close()

    async def _start_reaper(self) -> None:
        async with self._starting_reaper:
            if self._reaper is None:
                program = Path(__file__).with_name("reaper.py")
                argv = [sys.executable, "-P", str(program), self.engine.url, f"{OWNER}={self.owner.token}"]
                self._reaper = await asyncio.to_thread(
                    subprocess.Popen,
                    [*argv, str(os.getpid()), str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # Ctrl-C in the host's terminal must not reach it.
                    start_new_session=True,
                    cwd="/",
                    # It finds the docker SDK where this process does.
                    env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if os.path.isabs(path))},
                )

    def _archive_path(self, snapshot: str) -> Path:
        return self.folder / f"{snapshot.rpartition(':')[2]}.tar"

    async def _check_workdir(self, image: str, workdir: str) -> None:
        """Refuse an image whose files in the workdir would be hidden by its tmpfs."""
        if (image, workdir) not in self._workdir_has_files:
            container = await self.engine.call(
                lambda client: client.create_container_from_config(
                    {"Image": image, "Entrypoint": ["/bin/sh"], "Labels": self.owner.labels(60.0)}
                ),
                SandboxUnavailable,
            )
            assert container is not None
            try:
                holds_files = await self.engine.call(
                    lambda client: _holds_files(client, container["Id"], workdir), SandboxUnavailable, allowed=(404,)
                )
            finally:
                await self.remove_container(container["Id"])
            self._workdir_has_files[image, workdir] = bool(holds_files)
        if self._workdir_has_files[image, workdir]:
            raise SandboxUnavailable(
                f"image {image!r} has files in the workdir {workdir!r}, which would be hidden: files are kept "
                "in memory there (sandbox.config.files). Set files to 'layer' (where the engine cannot bound a "
                "container's layer, limits.disk does not hold then), or choose another workdir"
            )


def _holds_files(client: Any, container: str, folder: str) -> bool:
    pieces, state = client.get_archive(container, folder)
    head = b""
    for piece in pieces:
        head += piece
        if len(head) >= 4 * tarfile.BLOCKSIZE:
            break
    pieces.close()
    # The folder itself takes one block; the second is its first entry, or zeros.
    return not state["mode"] & (1 << 31) or bool(head[tarfile.BLOCKSIZE : 2 * tarfile.BLOCKSIZE].strip(b"\0"))
