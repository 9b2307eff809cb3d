"""What all sandboxes of one docker backend share.

Owns: :class:`Keeper`: the engine, the images, the snapshots, and the guardian that cleans up after this process.
Refuses: one sandbox (``sandbox.py``), and what the backend offers (``backend.py``).
"""

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
from turnwise.sandboxes.docker import owner
from turnwise.sandboxes.docker.engine import Engine
from turnwise.sandboxes.docker.images import Images
from turnwise.sandboxes.docker.settings import DockerOptions, container_settings

_ABSENT: Final = (404, 409)
_IN_USE: Final = 409
_GUARDIAN_S: Final = 20.0
_LAYER: Final = "turnwise-snapshot"
_FILES: Final = "turnwise-files"


class Keeper:
    """What all sandboxes of one backend share.

    Args:
        options: What the backend is told.

    Attributes:
        engine: Where its containers are.
        images: Their images.
        owner: Whose they are.
        in_memory: Whether files are written to memory, below the workdir, /tmp and the home folder.
        bounded_layer: Whether the engine bounds a container's layer.
        local: Whether the engine sees the files of this machine.
        capabilities: What was found; None before.
    """

    def __init__(self, options: DockerOptions) -> None:
        self.options = options
        self.engine = Engine(options.url, options.concurrency)
        self.images = Images(self.engine, options.pull)
        self.owner = owner.Owner()
        self.in_memory = options.files == "tmpfs"
        self.bounded_layer = False
        self.local = self.engine.socket_path is not None
        self.capabilities: Capabilities | None = None
        self._folder: Path | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._guarding = asyncio.Lock()
        self._snapshots: dict[str, str] = {}
        self._looked: dict[tuple[str, str], bool] = {}

    @property
    def folder(self) -> Path:
        """A folder of this machine that goes with the backend; made when it is first asked for."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="turnwise-docker-"))
        return self._folder

    async def settings(self, spec: SandboxSpec, sandbox: str) -> dict[str, Any]:
        """Return what the engine is asked for, for one sandbox. Who cleans up after this process runs from then on.

        Raises:
            SandboxUnavailable: The engine cannot give it.
        """
        await self._guard()
        if spec.snapshot is None:
            image = await self.images.resolve(spec.image or self.options.image)
            if self.in_memory:
                await self._nothing_hidden(image, spec.workdir)
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
            labels={owner.SANDBOX: sandbox, **self.owner.labels(self.options.ttl)},
            in_memory=self.in_memory,
            bounded_layer=self.bounded_layer,
            local=self.local,
        )

    async def keep(self, sandbox: str, image: str, packed: IO[bytes] | None) -> str:
        """Keep files as a snapshot: those of a container's layer, or an archive, and return its name."""
        word = os.urandom(8).hex()
        if packed is not None:
            name = f"{_FILES}:{word}"

            def write() -> None:
                with self._file(name).open("wb") as file:
                    shutil.copyfileobj(packed, file, 2**20)

            await asyncio.to_thread(write)
            self._snapshots[name] = image
            return name
        name = f"{_LAYER}:{word}"
        labels = {owner.SNAPSHOT: sandbox, **self.owner.labels(self.options.ttl)}
        self._snapshots[name] = name
        await self.engine.call(
            lambda client: client.commit(
                sandbox,
                repository=_LAYER,
                tag=word,
                changes=[f'LABEL {key}="{value}"' for key, value in labels.items()],
            ),
            what="the sandbox has ended, or its files cannot be kept",
        )
        return name

    def kept(self, snapshot: str) -> Path | None:
        """Return where the files of a snapshot are, where they were in memory."""
        path = self._file(snapshot)
        return path if snapshot.startswith(_FILES) and path.is_file() else None

    async def drop(self, snapshot: str) -> None:
        """Remove a snapshot. One whose layer is still in use goes when the backend closes."""
        if self._snapshots.get(snapshot) == snapshot:
            status = await self.remove_image(snapshot)
            if status == _IN_USE:
                return
        self._snapshots.pop(snapshot, None)
        if snapshot.startswith(_FILES):
            self._file(snapshot).unlink(missing_ok=True)

    async def remove_container(self, container: str) -> None:
        """Remove a container, running or not. One that is not there, or being removed, is no error."""
        await self.engine.call(
            lambda client: client.remove_container(container, force=True, v=True),
            what=f"container {container} was not removed",
            allowed=_ABSENT,
        )

    async def remove_image(self, image: str) -> int:
        """Remove an image, and return 0 or the status with which that was refused."""
        status, _ = await self.engine.status(
            lambda client: client.remove_image(image, force=True), f"image {image} was not removed"
        )
        return status

    async def close(self) -> None:
        """Free everything. Closing twice is no error."""
        await self.images.close()
        for snapshot in reversed(list(self._snapshots)):
            with contextlib.suppress(SandboxError):
                await self.drop(snapshot)
        self._snapshots.clear()
        process, self._guardian = self._guardian, None
        if process is not None and process.stdin is not None:
            # It removes what is left, as it does when this process dies, and is waited for.
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _GUARDIAN_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        await self.engine.close()

    async def _guard(self) -> None:
        async with self._guarding:
            if self._guardian is None:
                program = Path(__file__).with_name("guardian.py")
                where = f"unix://{self.engine.socket_path}" if self.engine.socket_path else self.engine.url
                argv = [sys.executable, "-I", "-S", str(program), where, f"{owner.OWNER}={self.owner.token}"]
                self._guardian = await asyncio.to_thread(
                    subprocess.Popen,
                    [*argv, str(os.getpid()), str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # Ctrl-C in the host's terminal is not for it.
                    start_new_session=True,
                    cwd="/",
                    env={},
                )

    def _file(self, snapshot: str) -> Path:
        return self.folder / f"{snapshot.rpartition(':')[2]}.tar"

    async def _nothing_hidden(self, image: str, workdir: str) -> None:
        """Refuse an image whose own files in the workdir would be out of sight, below the memory that is put there."""
        if (image, workdir) not in self._looked:
            made = await self.engine.call(
                lambda client: client.create_container_from_config(
                    {"Image": image, "Entrypoint": ["/bin/sh"], "Labels": self.owner.labels(60.0)}
                ),
                SandboxUnavailable,
            )
            assert made is not None
            try:
                held = await self.engine.call(
                    lambda client: _holds_files(client, made["Id"], workdir), SandboxUnavailable, allowed=(404,)
                )
            finally:
                await self.remove_container(made["Id"])
            self._looked[image, workdir] = bool(held)
        if self._looked[image, workdir]:
            raise SandboxUnavailable(
                f"image {image!r} has files in the workdir {workdir!r}, which would be out of sight: files are kept "
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
    # The folder itself takes one block; the second is of what is in it, or nothing.
    return not state["mode"] & (1 << 31) or bool(head[tarfile.BLOCKSIZE : 2 * tarfile.BLOCKSIZE].strip(b"\0"))
