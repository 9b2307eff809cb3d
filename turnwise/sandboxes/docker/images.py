"""Images of sandboxes: found by name, fetched, built from a Dockerfile, or made of a root file system.

Owns: :class:`Images`. Refuses: snapshots (``sandbox.py``), and what an image is for.
"""

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
    """The images that one backend uses; each is looked for once.

    Args:
        engine: Where they are.
        pull: Whether they are fetched: ``missing``, ``never`` or ``always``.
    """

    def __init__(self, engine: Engine, pull: str) -> None:
        self._engine = engine
        self._pull = pull
        self._found: dict[str, asyncio.Task[str]] = {}

    async def resolve(self, image: str) -> str:
        """Return the name of an image that the engine has.

        Args:
            image: A name, as ``python:3.11-slim``; or a path (it begins with ``/``, ``./``, ``../`` or ``~``): a folder
                with a ``Dockerfile`` is built, a folder or archive that holds a root file system is imported, each
                once for what it holds.

        Raises:
            SandboxUnavailable: There is none, and none can be had.
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
        """Give up what is under way."""
        for task in self._found.values():
            task.cancel()
        await asyncio.gather(*self._found.values(), return_exceptions=True)

    async def build(self, folder: Path, tag: str | None = None) -> str:
        """Build the image of a folder with a ``Dockerfile``, unless the engine has it.

        Args:
            folder: What the build sees.
            tag: Its name; None: one for what the folder holds.

        Raises:
            SandboxUnavailable: It does not build; the message ends with what the build said last.
        """
        if not (folder / "Dockerfile").is_file():
            raise SandboxUnavailable(f"image {str(folder)!r} cannot be built: there is no Dockerfile in it")
        name = tag or f"turnwise-built:{await asyncio.to_thread(_content, folder)}"

        def build(client: Any) -> None:
            said: list[str] = []
            for line in client.build(path=str(folder), tag=name, rm=True, forcerm=True, decode=True):
                said.append(str(line.get("stream") or line.get("error") or ""))
                if "error" in line:
                    last = "".join(said)[-2000:].strip()
                    raise SandboxUnavailable(f"image {str(folder)!r} does not build: {last}")

        return await self._unless_there(name, build, f"building the image of {folder}")

    async def import_root(self, source: Path, tag: str | None = None) -> str:
        """Make an image of a root file system, a folder or an archive, unless the engine has it.

        Args:
            source: The folder or archive.
            tag: Its name; None: one for what it holds.

        Raises:
            SandboxUnavailable: It cannot be read, or is none.
        """
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
                raise SandboxUnavailable(f"{what} left no image {name!r}")
        return name

    async def _resolve(self, image: str) -> str:
        if image.startswith(("/", "./", "../", "~")):
            return await self._from_path(Path(image).expanduser())
        there = await self._is_there(image)
        if there and self._pull != "always":
            return image
        if self._pull == "never":
            raise SandboxUnavailable(
                f"image {image!r} is not there, and sandbox.config.pull is 'never': docker pull {image}, or set pull "
                f"to 'missing', or choose another image (sandbox.config.image, or the task's)"
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
    """Take a name apart; without a tag it means the latest, not all of them."""
    head, slash, last = image.rpartition("/")
    name, _, tag = last.partition(":")
    return f"{head}{slash}{name}", ":", tag or "latest"


def _content(path: Path) -> str:
    """Return a word for what a file or folder holds: names, permissions, times and sizes, of a build also the bytes."""
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
