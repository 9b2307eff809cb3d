"""What all sandboxes of one docker backend share.

Arguments: the engine's URL, the token's label, the host's number, the folder. Its input is a pipe that the host holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from turnwise.errors import SandboxError, SandboxUnavailable
from turnwise.sandboxes.core import Capabilities, SandboxSpec
from turnwise.sandboxes.docker import engine as owner
from turnwise.sandboxes.docker.engine import REMEDY, DockerOptions, Engine, container_settings

_ARCHIVES: Final = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
_NOT_FOUND: Final = 404


class Images:
    """The images of one backend, each resolved once; ``pull`` is ``missing``, ``never`` or ``always``."""

    def __init__(self, engine: Engine, pull: str) -> None:
        self._engine = engine
        self._pull = pull
        self._found: dict[str, asyncio.Task[str]] = {}

    async def resolve(self, image: str) -> str:
        """Return the name of an image that the engine has, after pulling, building or importing it if needed.

        An image is a name, as ``python:3.11-slim``, or a path (beginning with ``/``, ``./``, ``../`` or ``~``): a
        folder with a ``Dockerfile`` is built, a root file system (folder or archive) imported, once per content. Raises
        SandboxUnavailable.
        """
        task = self._found.get(image)
        if task is None:
            task = self._found[image] = asyncio.create_task(self._resolve(image))
        try:
            return await asyncio.shield(task)
        except SandboxUnavailable:
            self._found.pop(image, None)
            raise

    async def close(self) -> None:
        """Cancel pending pulls and builds."""
        for task in self._found.values():
            task.cancel()
        await asyncio.gather(*self._found.values(), return_exceptions=True)

    async def build(self, folder: Path, tag: str | None = None) -> str:
        """Build a folder's ``Dockerfile`` unless done; ``tag`` None derives a name. Raises SandboxUnavailable."""
        if not (folder / "Dockerfile").is_file():
            raise SandboxUnavailable(f"image {str(folder)!r} cannot be built: it has no Dockerfile")
        name = tag or f"turnwise-built:{await asyncio.to_thread(_content, folder)}"

        def build(client: Any) -> None:
            said: list[str] = []
            for line in client.build(path=str(folder), tag=name, rm=True, forcerm=True, decode=True):
                said.append(str(line.get("stream") or line.get("error") or ""))
                if "error" in line:
                    last = "".join(said)[-2000:].strip()
                    raise SandboxUnavailable(f"image {str(folder)!r} failed to build: {last}")

        return await self._unless_there(name, build, f"building the image of {folder}")

    async def import_root(self, source: Path, tag: str | None = None) -> str:
        """Import a root file system unless that is done; ``tag`` None derives a name. Raises SandboxUnavailable."""
        name = tag or f"turnwise-rootfs:{await asyncio.to_thread(_content, source)}"

        def load(client: Any) -> None:
            repository, _, version = name.rpartition(":")
            if source.is_file():
                client.import_image_from_file(str(source), repository=repository, tag=version)
                return
            with tempfile.NamedTemporaryFile(suffix=".tar") as packed:
                with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
                    archive.add(source, arcname=".")
                packed.flush()
                client.import_image_from_file(packed.name, repository=repository, tag=version)

        return await self._unless_there(name, load, f"importing {source}")

    async def _unless_there(self, name: str, make: Callable[[Any], None], what: str) -> str:
        if not await self._is_there(name):
            await self._engine.call(make, SandboxUnavailable, what)
            if not await self._is_there(name):
                raise SandboxUnavailable(f"{what} produced no image {name!r}")
        return name

    async def _resolve(self, image: str) -> str:
        if image.startswith(("/", "./", "../", "~")):
            return await self._from_path(Path(image).expanduser())
        there = await self._is_there(image)
        if there and self._pull != "always":
            return image
        if self._pull == "never":
            raise SandboxUnavailable(
                f"image {image!r} does not exist here, and sandbox.config.pull is 'never': docker pull {image}, or set "
                f"pull to 'missing', or choose another image (sandbox.config.image, or the task's)"
            )

        def pull(client: Any) -> None:
            repository, _, tag = image.partition("@") if "@" in image else _split(image)
            for line in client.pull(repository, tag=tag, stream=True, decode=True):
                if "error" in line:
                    raise SandboxUnavailable(f"image {image!r} cannot be fetched: {line['error']}")

        await self._engine.call(pull, SandboxUnavailable, f"image {image!r} is not there and cannot be fetched")
        return image

    async def _from_path(self, path: Path) -> str:
        if path.is_dir() and (path / "Dockerfile").is_file():
            return await self.build(path)
        if path.name.endswith(_ARCHIVES) and path.is_file():
            return await self.import_root(path)
        if path.is_dir() and any((path / name).exists() for name in ("bin/sh", "usr/bin/sh")):
            return await self.import_root(path)
        raise SandboxUnavailable(
            f"image {str(path)!r} is a path, but neither a folder with a Dockerfile, nor a root file system (a folder "
            f"with bin/sh, or an archive: {', '.join(_ARCHIVES)})"
        )

    async def _is_there(self, name: str) -> bool:
        found = await self._engine.call(
            lambda client: client.inspect_image(name),
            SandboxUnavailable,
            f"looking for image {name!r} failed (to remedy it, {REMEDY})",
            allowed=(_NOT_FOUND,),
        )
        return found is not None


def _split(image: str) -> tuple[str, str, str]:
    head, slash, last = image.rpartition("/")
    name, _, tag = last.partition(":")
    return f"{head}{slash}{name}", ":", tag or "latest"


def _content(path: Path) -> str:
    """Return a digest of a file or folder: names, permissions, times and sizes; for builds also content."""
    digest = hashlib.blake2b(digest_size=10)
    build = (path / "Dockerfile").is_file()
    files = [path] if path.is_file() else [Path(top) / each for top, _, names in os.walk(path) for each in names]
    for file in sorted(files):
        state = file.lstat()
        digest.update(f"{file.relative_to(path)}\0{state.st_mode}\0{state.st_size}\0".encode())
        if build and file.is_file() and not file.is_symlink():
            digest.update(file.read_bytes())
        else:
            digest.update(str(state.st_mtime_ns).encode())
    return digest.hexdigest()


_ABSENT: Final = (404, 409)
_IN_USE: Final = 409
_GUARDIAN_S: Final = 20.0
_LAYER: Final = "turnwise-snapshot"
_FILES: Final = "turnwise-files"


class ContainerPool:
    """Shared state of one backend's sandboxes.

    Attributes:
        in_memory: Whether workdir, /tmp and home are tmpfs.
        bounded_layer: Whether the engine bounds a container's layer.
        local: Whether the engine sees this machine's files.
        capabilities: Probed capabilities, or None.
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
        """The backend's folder on this machine, created on first access."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="turnwise-docker-"))
        return self._folder

    async def settings(self, spec: SandboxSpec, sandbox: str) -> dict[str, Any]:
        """Return a container's settings and make sure the reaper runs. Raises SandboxUnavailable."""
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
        """Keep a container's layer, or an archive of its files, as a snapshot; return its name."""
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
        """Return the archive of a snapshot whose files were in memory, or None."""
        path = self._file(snapshot)
        return path if snapshot.startswith(_FILES) and path.is_file() else None

    async def drop(self, snapshot: str) -> None:
        """Remove a snapshot; one in use is removed when the backend closes."""
        if self._snapshots.get(snapshot) == snapshot:
            status = await self.remove_image(snapshot)
            if status == _IN_USE:
                return
        self._snapshots.pop(snapshot, None)
        if snapshot.startswith(_FILES):
            self._file(snapshot).unlink(missing_ok=True)

    async def remove_container(self, container: str) -> None:
        """Remove a container, running or not; a missing one is ignored."""
        await self.engine.call(
            lambda client: client.remove_container(container, force=True, v=True),
            what=f"container {container} was not removed",
            allowed=_ABSENT,
        )

    async def remove_image(self, image: str) -> int:
        """Remove an image; return 0 or the engine's error status."""
        status, _ = await self.engine.status(
            lambda client: client.remove_image(image, force=True), f"image {image} was not removed"
        )
        return status

    async def close(self) -> None:
        """Free everything; idempotent."""
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
                program = Path(__file__).with_name("reaper.py")
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
        """Refuse an image whose files in the workdir would be hidden by its tmpfs."""
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
    # The folder itself takes one block; the second is of what is in it, or nothing.
    return not state["mode"] & (1 << 31) or bool(head[tarfile.BLOCKSIZE : 2 * tarfile.BLOCKSIZE].strip(b"\0"))
