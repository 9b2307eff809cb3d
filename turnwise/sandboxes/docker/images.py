"""Images of the docker backend: pulled, built or imported once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.docker.engine import REMEDY, Engine

_ARCHIVES: Final = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
_NOT_FOUND: Final = 404


class Images:
    """The images of one backend, each resolved once; ``pull`` is ``missing``, ``never`` or ``always``."""

    def __init__(self, engine: Engine, pull: str) -> None:
        self._engine = engine
        self._pull = pull
        self._resolving: dict[str, asyncio.Task[str]] = {}

    async def resolve(self, image: str) -> str:
        """Return the name of an image that the engine has, after pulling, building or importing it if needed.

        An image is a name, as ``python:3.11-slim``, or a path (beginning with ``/``, ``./``, ``../`` or ``~``): a
        folder with a ``Dockerfile`` is built, a root file system (folder or archive) imported, once per content. Raises
        SandboxUnavailable.
        """
        task = self._resolving.get(image)
        if task is None:
            task = self._resolving[image] = asyncio.create_task(self._resolve(image))
        try:
            return await asyncio.shield(task)
        except SandboxUnavailable:
            self._resolving.pop(image, None)
            raise

    async def close(self) -> None:
        """Cancel pending pulls and builds."""
        for task in self._resolving.values():
            task.cancel()
        await asyncio.gather(*self._resolving.values(), return_exceptions=True)

    async def _build(self, folder: Path) -> str:
        """Build a folder's ``Dockerfile`` unless that is done."""
        name = f"turnwise-built:{await asyncio.to_thread(_content_digest, folder)}"

        def build(client: Any) -> None:
            output: list[str] = []
            for line in client.build(path=str(folder), tag=name, rm=True, forcerm=True, decode=True):
                output.append(str(line.get("stream") or line.get("error") or ""))
                if "error" in line:
                    tail = "".join(output)[-2000:].strip()
                    raise SandboxUnavailable(f"image {str(folder)!r} failed to build: {tail}")

        return await self._make_once(name, build, f"building the image of {folder}")

    async def _import_root(self, source: Path) -> str:
        """Import a root file system unless that is done."""
        name = f"turnwise-rootfs:{await asyncio.to_thread(_content_digest, source)}"

        def load(client: Any) -> None:
            repository, _, version = name.rpartition(":")
            if source.is_file():
                client.import_image_from_file(str(source), repository=repository, tag=version)
                return
            with tempfile.NamedTemporaryFile(suffix=".tar") as archive_file:
                with tarfile.open(fileobj=archive_file, mode="w", format=tarfile.GNU_FORMAT) as archive:
                    archive.add(source, arcname=".")
                archive_file.flush()
                client.import_image_from_file(archive_file.name, repository=repository, tag=version)

        return await self._make_once(name, load, f"importing {source}")

    async def _make_once(self, name: str, make: Callable[[Any], None], action: str) -> str:
        if not await self._exists(name):
            await self._engine.call(make, SandboxUnavailable, action)
            if not await self._exists(name):
                raise SandboxUnavailable(f"{action} produced no image {name!r}")
        return name

    async def _resolve(self, image: str) -> str:
        if image.startswith(("/", "./", "../", "~")):
            return await self._from_path(Path(image).expanduser())
        exists = await self._exists(image)
        if exists and self._pull != "always":
            return image
        if self._pull == "never":
            raise SandboxUnavailable(
                f"image {image!r} does not exist here, and sandbox.config.pull is 'never': docker pull {image}, or set "
                f"pull to 'missing', or choose another image (sandbox.config.image, or the task's)"
            )

        def pull(client: Any) -> None:
            for line in client.pull(image, stream=True, decode=True):
                if "error" in line:
                    raise SandboxUnavailable(f"image {image!r} cannot be fetched: {line['error']}")

        await self._engine.call(pull, SandboxUnavailable, f"image {image!r} is missing and cannot be fetched")
        return image

    async def _from_path(self, path: Path) -> str:
        if path.is_dir() and (path / "Dockerfile").is_file():
            return await self._build(path)
        is_root = path.is_dir() and any((path / name).exists() for name in ("bin/sh", "usr/bin/sh"))
        if is_root or (path.name.endswith(_ARCHIVES) and path.is_file()):
            return await self._import_root(path)
        raise SandboxUnavailable(
            f"image {str(path)!r} is a path, but neither a folder with a Dockerfile, nor a root file system (a folder "
            f"with bin/sh, or an archive: {', '.join(_ARCHIVES)})"
        )

    async def _exists(self, name: str) -> bool:
        image = await self._engine.call(
            lambda client: client.inspect_image(name),
            SandboxUnavailable,
            f"the search for image {name!r} failed (to remedy it, {REMEDY})",
            allowed=(_NOT_FOUND,),
        )
        return image is not None


def _content_digest(path: Path) -> str:
    """Return a digest of a file or folder: names, permissions, times and sizes; for builds also content."""
    digest = hashlib.blake2b(digest_size=10)
    is_build = (path / "Dockerfile").is_file()
    files = [path] if path.is_file() else [Path(top) / name for top, _, names in os.walk(path) for name in names]
    for file in sorted(files):
        status = file.lstat()
        digest.update(f"{file.relative_to(path)}\0{status.st_mode}\0{status.st_size}\0".encode())
        if is_build and file.is_file() and not file.is_symlink():
            digest.update(file.read_bytes())
        else:
            digest.update(str(status.st_mtime_ns).encode())
    return digest.hexdigest()
