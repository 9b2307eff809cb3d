"""Archives of files on their way into a sandbox and out of it.

Owns: :func:`pack` and :func:`unpack`. Refuses: how an archive gets inside or comes out. What comes out was made by code
that nobody trusts: no name and no link in it leads anywhere but below the target.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path
from typing import IO, Final

from turnwise.errors import SandboxFileError, SandboxFileTooLarge

OVERHEAD: Final = 64 * 2**20
"""Bytes that an archive may have besides the content of its files."""


def pack(source: Path, out: IO[bytes], *, name: str = ".", uid: int = 0, gid: int = 0) -> None:
    """Write an archive of a file or a folder. Links stay links; devices, pipes and sockets are left out.

    Args:
        source: What is packed.
        out: Where the archive goes.
        name: What it is called in the archive; what is in a folder stands below.
        uid: Whose it is there.
        gid: Of which group.

    Raises:
        FileNotFoundError: There is no such thing.
    """

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        member.uid, member.gid, member.uname, member.gname = uid, gid, "", ""
        return member

    # A link that is itself asked for stands for what it leads to; one below stays a link.
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(source.resolve(strict=True), arcname=name, filter=owned)


def unpack(archive: IO[bytes], target: Path, *, max_bytes: int) -> None:
    """Write what an archive holds below a target, or, of an archive of one file, as the target.

    Names that lead out are left out, and so are links that do, devices, pipes and sockets. What is special about
    permissions is dropped.

    Args:
        archive: An archive of one file, or of the content of a folder (which begins with ``.``).
        target: Where it goes.
        max_bytes: What all files may hold together.

    Raises:
        SandboxFileTooLarge: They hold more.
        SandboxFileError: It is no archive.
    """
    links: list[tuple[Path, str]] = []
    size = 0
    folder = False
    try:
        with tarfile.open(fileobj=archive, mode="r:") as members:
            for number, member in enumerate(members):
                if number == 0:
                    folder = member.isdir()
                    (target if folder else target.parent).mkdir(parents=True, exist_ok=True)
                path = _below(target, member.name, folder=folder)
                if path is None:
                    continue
                size += member.size if member.isreg() else 0
                if size > max_bytes:
                    raise SandboxFileTooLarge(f"the files hold more than max_bytes={max_bytes}")
                if member.isdir():
                    _make_folder(path, target)
                elif member.issym() and folder:
                    links.append((path, member.linkname))
                elif member.isreg() or member.islnk():
                    _write(members, member, path, target)
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise SandboxFileError(f"what came out of the sandbox is no archive: {error}") from error
    _link(links, target)


def _below(target: Path, name: str, *, folder: bool) -> Path | None:
    if not folder:
        return target
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if name.startswith("/") or ".." in parts or "\0" in name:
        return None
    return target.joinpath(*parts)


def _make_folder(path: Path, target: Path) -> bool:
    """Make a folder below the target; whether there is one then, reached by no link."""
    at = target
    for part in path.relative_to(target).parts:
        at = at / part
        if at.is_symlink() or (at.exists() and not at.is_dir()):
            return False
        at.mkdir(exist_ok=True)
    return True


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path, target: Path) -> None:
    if path != target and not _make_folder(path.parent, target):
        return
    if path.is_dir() and not path.is_symlink():
        return
    try:
        # A second name of a file is written as a file of its own.
        content = members.extractfile(member)
    except KeyError:
        content = None
    if content is None:
        return
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, (member.mode & 0o755) | 0o600)
    with content, os.fdopen(descriptor, "wb") as written:
        shutil.copyfileobj(content, written, 2**20)


def _link(links: list[tuple[Path, str]], target: Path) -> None:
    """Make links, and remove those that lead out: only when all are there is it known where each leads."""
    made = []
    for path, leads_to in links:
        if leads_to.startswith("/") or not _make_folder(path.parent, target) or (path.exists() and path.is_dir()):
            continue
        path.unlink(missing_ok=True)
        path.symlink_to(leads_to)
        made.append(path)
    top = target.resolve()
    while out := [path for path in made if not _inside(path, top)]:
        for path in out:
            path.unlink()
            made.remove(path)


def _inside(path: Path, top: Path) -> bool:
    try:
        return path.resolve().is_relative_to(top)
    except (OSError, RuntimeError):
        return False  # a circle
