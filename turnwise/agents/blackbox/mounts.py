"""What of this machine a program needs to be seen in a sandbox, so that it runs there as it is installed here.

Owns: :func:`shown_for`, :func:`read_mount` and :func:`paths_within`. Refuses: mounting anything; the sandbox does.

A program is found again at the path that it has here: scripts name their interpreters, and virtual environments
themselves, by such paths. What lies in the system's own folders is not shown: a sandbox has a system of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from turnwise.errors import AgentError, shown
from turnwise.sandboxes.core import Mount

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev")
_MOST_LINKS: Final = 40


def shown_for(program: str) -> tuple[Path, ...]:
    """Return the folders and files that a program consists of, those of its interpreter included.

    Args:
        program: Its path.
    """
    found = dict.fromkeys(_parts(Path(os.path.abspath(program)), set()))
    return tuple(path for path in found if not any(path != other and path.is_relative_to(other) for other in found))


def read_mount(text: str) -> Mount:
    """Return what ``HOST`` or ``HOST:INSIDE`` asks for.

    Raises:
        AgentError: There is no such thing on this machine, or no absolute path is given for the inside.
    """
    host, _, inside = text.partition(":")
    source = Path(os.path.abspath(os.path.expanduser(host)))
    if not source.exists():
        raise AgentError(f"blackbox: mounts names {shown(host)}, and there is no such file or folder")
    target = inside or str(source)
    if not target.startswith("/") or os.path.normpath(target) == "/":
        raise AgentError(f"blackbox: mounts has {shown(text)}: write HOST or HOST:INSIDE, INSIDE an absolute path")
    return Mount(source, os.path.normpath(target))


def paths_within(mounts: Sequence[Mount]) -> list[str]:
    """Return those folders in which programs are looked for here that mounts show at the path that they have here."""
    same = [each.source for each in mounts if str(each.source) == each.target]
    folders = [Path(each) for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(each)]
    return [str(each) for each in folders if any(each.is_relative_to(one) or each == one.parent for one in same)]


def _parts(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield what a file belongs to, for each link on the way to it, and for the interpreter that it names."""
    for _ in range(_MOST_LINKS):
        if path in seen or not os.path.lexists(path):
            return
        seen.add(path)
        if _of_system(path):
            return
        yield from _whole(path)
        if not path.is_symlink():
            break
        # A link is resolved in the folder where it really is.
        path = Path(os.path.normpath(path.parent.resolve() / os.readlink(path)))
    # Folders on the way may be links, too.
    if not _of_system(path.resolve()):
        yield from _whole(path.resolve())
    interpreter = _interpreter(path)
    if interpreter is not None:
        yield from _parts(interpreter, seen)


def _whole(path: Path) -> Iterator[Path]:
    """Yield the folders that a file does not work without; the file itself where there are none."""
    for index, name in enumerate(path.parts):
        if name == "node_modules":
            yield Path(*path.parts[: index + 1])
            return
    for folder in path.parents:
        if (folder / "pyvenv.cfg").is_file():
            yield folder
            yield from _made_from(folder)
            return
    prefix = path.parent.parent
    of_python = path.parent.name == "bin" and prefix != Path("/") and any(prefix.glob("lib/python3*/os.py"))
    yield prefix if of_python else path


def _of_system(path: Path) -> bool:
    return any(path.is_relative_to(each) for each in _SYSTEM)


def _made_from(environment: Path) -> Iterator[Path]:
    """Yield the prefix of the interpreter that a virtual environment was made from."""
    for line in (environment / "pyvenv.cfg").read_text("utf-8", "replace").splitlines():
        key, _, value = line.partition("=")
        prefix = Path(value.strip()).parent
        if key.strip() == "home" and not _of_system(prefix) and prefix != Path("/"):
            yield prefix


def _interpreter(path: Path) -> Path | None:
    """Return the interpreter of a script."""
    try:
        with path.open("rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [found for word in words[1:] if not word.startswith("-") and (found := shutil.which(word))]
    return Path(words[0]) if words and words[0].startswith("/") else None
