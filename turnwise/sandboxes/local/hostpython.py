"""The interpreter and the packages of this process, seen from inside a sandbox.

:func:`host_python` is what a sandbox needs to have them; :func:`base_executable` the program itself.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from turnwise.sandboxes.core import Mount

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base_executable() -> Path:
    """Return the interpreter's program where its standard library and its libraries lie beside it.

    A virtual environment may hold a copy of the program, which finds neither once it is shown alone: it would run on
    the libraries of another Python of the machine, or not at all.
    """
    return Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))


def host_python() -> tuple[tuple[Mount, ...], dict[str, str]]:
    """Return mounts and variables with which ``python`` inside is the interpreter of this process, with its packages.

    Everything is seen where it is on the host, so that the links and paths in it hold. What is on the host's system
    folders is not mounted: ``local`` shows them, and an image has its own.

    Returns:
        What to put into ``SandboxSpec.mounts`` and ``SandboxSpec.env``.
    """
    folders = [Path(sys.base_prefix), Path(sys.prefix), Path(sys.base_exec_prefix)]
    # A link on the way (a version manager's "3.11" for "3.11.7") is followed by what it leads to, under its own name.
    folders += [Path(os.path.realpath(sys.executable)).parents[1], base_executable().parents[1]]
    home = _home_of(Path(sys.prefix))
    if home is not None:
        folders.append(home.parent)
    places = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    # A .pth file may add another environment's packages.
    places += [each for each in sys.path if each.endswith(("site-packages", "dist-packages")) and os.path.isdir(each)]
    for place in map(Path, places):
        if not any(place.is_relative_to(folder) for folder in folders):
            folders.append(place)
    mounts: list[Mount] = []
    for folder in sorted(set(folders), key=lambda each: len(each.parts)):
        inside = any(folder.is_relative_to(each) for each in (*_SYSTEM, *(mount.target for mount in mounts)))
        if not inside and folder != Path("/"):
            mounts.append(Mount(folder, str(folder)))
    binaries = os.path.join(sys.prefix, "bin")
    path = SYSTEM_PATH if binaries in SYSTEM_PATH.split(":") else f"{binaries}:{SYSTEM_PATH}"
    env = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if sys.prefix != sys.base_prefix:
        env["VIRTUAL_ENV"] = sys.prefix
    return tuple(mounts), env


def _home_of(prefix: Path) -> Path | None:
    """Return the folder of programs that a virtual environment was made from, as it names it."""
    try:
        for line in (prefix / "pyvenv.cfg").read_text().splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                return Path(value.strip())
    except OSError:
        return None
    return None
