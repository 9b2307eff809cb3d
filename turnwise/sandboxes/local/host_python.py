"""This process's Python inside a sandbox: its interpreter, its packages, and the check of its version."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.core import Mount

_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base_executable() -> Path:
    """Return the base interpreter's program: a virtual environment's copy finds no libraries when mounted alone."""
    return Path(os.path.realpath(_base_program()))


def _base_program() -> str:
    return getattr(sys, "_base_executable", None) or sys.executable


def host_python() -> tuple[tuple[Mount, ...], dict[str, str]]:
    """Return mounts and variables that make ``python`` inside this process's interpreter, with its packages.

    Host paths are kept, so that links and absolute paths remain valid. System folders are not mounted: ``local`` shows
    them, and an image has its own.
    """
    folders = [Path(sys.base_prefix), Path(sys.prefix), Path(sys.base_exec_prefix)]
    # A link in the path (a version manager's "3.11" for "3.11.7") is mounted with its target, each under its own name.
    folders += [Path(os.path.realpath(sys.executable)).parents[1], base_executable().parents[1]]
    folders.append(Path(_base_program()).parents[1])
    package_folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    # A .pth file may add another environment's packages.
    package_folders += [
        entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages")) and os.path.isdir(entry)
    ]
    for package_folder in map(Path, package_folders):
        if not any(package_folder.is_relative_to(folder) for folder in folders):
            folders.append(package_folder)
    mounts: list[Mount] = []
    for folder in sorted(set(folders), key=lambda path: len(path.parts)):
        covered = any(folder.is_relative_to(top) for top in (*_SYSTEM_FOLDERS, *(mount.target for mount in mounts)))
        if not covered and folder != Path("/"):
            mounts.append(Mount(folder, str(folder)))
    binaries = os.path.join(sys.prefix, "bin")
    path = SYSTEM_PATH if binaries in SYSTEM_PATH.split(":") else f"{binaries}:{SYSTEM_PATH}"
    env = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if sys.prefix != sys.base_prefix:
        env["VIRTUAL_ENV"] = sys.prefix
    return tuple(mounts), env


def interpreter_folder() -> Path:
    """Return the folder of this process's interpreter, which runs the agent."""
    return base_executable().parents[1]


def check_python(version: int) -> None:
    """Raise SandboxUnavailable unless the agent's ``sys.hexversion`` is of the same minor version as this process's."""
    if version >> 16 != sys.hexversion >> 16:
        inside_version = ".".join(str(version >> shift & 0xFF) for shift in (24, 16, 8))
        raise SandboxUnavailable(
            f"inside a sandbox Python is {inside_version}, and this process runs on {sys.version.split()[0]}: the "
            f"standard library or libpython of {base_executable()} is not below {interpreter_folder()}, the only "
            "folder of it that sandboxes see. Make the virtual environment from an interpreter that is "
            "installed in one folder"
        )
