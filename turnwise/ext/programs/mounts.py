"""The files of a program: its folders, its interpreter and links, as mounts of a sandbox.

A program is mounted at its host path: scripts name their interpreters, and virtual environments themselves, by absolute
paths. System folders are not mounted: a sandbox has its own system.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from turnwise.errors import AgentError, shown
from turnwise.sandboxes.core import Mount

_SYSTEM_FOLDERS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev")
_MAX_LINKS: Final = 40


def program_paths(program: str) -> tuple[Path, ...]:
    """Return the folders and files of a program, its interpreter included."""
    paths = dict.fromkeys(_files_behind(Path(os.path.abspath(program)), set()))
    return tuple(path for path in paths if not any(path != other and path.is_relative_to(other) for other in paths))


def read_mount(text: str) -> Mount:
    """Parse ``HOST`` or ``HOST:INSIDE``."""
    host, _, inner = text.partition(":")
    source = Path(os.path.abspath(os.path.expanduser(host)))
    if not source.exists():
        raise AgentError(f"blackbox: mounts names {shown(host)}: there is no such file or folder")
    target = inner or str(source)
    if not target.startswith("/") or os.path.normpath(target) == "/":
        raise AgentError(f"blackbox: mounts has {shown(text)}: write HOST or HOST:INSIDE, INSIDE an absolute path")
    return Mount(source, os.path.normpath(target))


def paths_within(mounts: Sequence[Mount]) -> list[str]:
    """Return the entries of this process's ``PATH`` that are mounted at the same path."""
    mounted = [folder.source for folder in mounts if str(folder.source) == folder.target]
    folders = [Path(folder) for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(folder)]
    return [
        str(folder) for folder in folders if any(folder.is_relative_to(one) or folder == one.parent for one in mounted)
    ]


def _files_behind(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files behind a path: each link on the way, and the interpreter that it names."""
    for _ in range(_MAX_LINKS):
        if path in seen or not os.path.lexists(path):
            return
        seen.add(path)
        if _is_system(path):
            return
        yield from _dependencies(path)
        if not path.is_symlink():
            break
        # A link is resolved in the folder where it really is.
        path = Path(os.path.normpath(path.parent.resolve() / os.readlink(path)))
    # Folders on the way may be links, too.
    if not _is_system(path.resolve()):
        yield from _dependencies(path.resolve())
    interpreter = _interpreter(path)
    if interpreter is not None:
        yield from _files_behind(interpreter, seen)


def _dependencies(path: Path) -> Iterator[Path]:
    """Yield the folders that a file depends on, or the file itself."""
    for index, name in enumerate(path.parts):
        if name == "node_modules":
            yield Path(*path.parts[: index + 1])
            return
    for folder in path.parents:
        if (folder / "pyvenv.cfg").is_file():
            yield folder
            yield from _base_prefix(folder)
            return
    prefix = path.parent.parent
    of_python = path.parent.name == "bin" and prefix != Path("/") and any(prefix.glob("lib/python3*/os.py"))
    yield prefix if of_python else path


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(system_path) for system_path in _SYSTEM_FOLDERS)


def _base_prefix(environment: Path) -> Iterator[Path]:
    """Yield the prefix of the base interpreter of a virtual environment."""
    for line in (environment / "pyvenv.cfg").read_text("utf-8", "replace").splitlines():
        key, _, value = line.partition("=")
        prefix = Path(value.strip()).parent
        if key.strip() == "home" and not _is_system(prefix) and prefix != Path("/"):
            yield prefix


def _interpreter(path: Path) -> Path | None:
    try:
        with path.open("rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [resolved for word in words[1:] if not word.startswith("-") and (resolved := shutil.which(word))]
    return Path(words[0]) if words and words[0].startswith("/") else None
