"""Launch plans of local sandboxes: mounts, files, isolation arguments, and the agent's first message."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.core import SandboxSpec, check_sources
from turnwise.sandboxes.local.boot import seccomp
from turnwise.sandboxes.local.control_groups import RESERVE, ControlGroups
from turnwise.sandboxes.local.host_python import SYSTEM_PATH, base_executable, interpreter_folder
from turnwise.sandboxes.local.snapshots import Origin

Isolation = Literal["bubblewrap", "landlock", "plain"]


@dataclass(frozen=True, slots=True)
class IsolationLevel:
    """One isolation method, as it works on this machine.

    Attributes:
        isolation: Its name.
        uid: User of the sandbox, or the first one of all, if this process is root; None: its own.
        program: Path of bubblewrap.
        stage: Private file system mounted before a start: ``root`` (by root's own right), ``user`` (in a user
            namespace), or None (files in the state folder).
        overlay: Whether workspaces are copy-on-write overlays; otherwise copies.
        groups: Available control groups.
        without: Containments switched off by tests that show their effect.
    """

    isolation: Isolation
    uid: int | None = None
    program: str = ""
    stage: Literal["root", "user"] | None = None
    overlay: bool = False
    groups: ControlGroups = field(default_factory=ControlGroups)
    without: frozenset[str] = frozenset()


USER: Final = "sandbox"
HOME: Final = f"/home/{USER}"
USER_ID: Final = 1000
"""The user's id inside."""
BOOT: Final = "/run/turnwise/boot"
PYTHON: Final = "/run/turnwise/python"
LIBRARIES: Final = "/run/turnwise/lib"
_FOLDERS: Final = (("work", 0o755), ("home", 0o755), ("tmp", 0o1777), ("vartmp", 0o1777), ("shm", 0o1777))
SNAPSHOT_FOLDERS: Final = ("home", "tmp", "vartmp")
"""Folders of a snapshot besides the workdir or the image's root."""
_ETC_FOLDERS: Final = ("alternatives", "ssl", "ca-certificates")
COPIED_ETC_FILES: Final = ("ld.so.cache", "localtime", "mime.types")
"""Files of the host's ``/etc`` that are copied once, because every mount makes a start slower."""
_SYSTEM_FOLDERS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


@dataclass(frozen=True, slots=True)
class HostPaths:
    """The host folders of one sandbox, below the state folder of its host process."""

    state: Path
    name: str

    @property
    def home(self) -> Path:
        """The sandbox's folder, removed at its end."""
        return self.state / "boxes" / self.name

    def files(self, level: IsolationLevel) -> Path:
        """Folder of its files: below ``home``, or in a private file system mounted over that path."""
        return self.home / "files" if level.stage is None else self.state / "stage"


def launch_plan(level: IsolationLevel, spec: SandboxSpec, paths: HostPaths, origin: Origin) -> dict[str, Any]:
    """Return the launcher's plan of a sandbox."""
    # Where only the group counts processes, the agent's are within the limit.
    reserve = RESERVE if level.isolation == "bubblewrap" else 0
    groups = level.groups.plan(paths.state.name, paths.name, spec.limits, reserve)
    launch: dict[str, Any] = {
        "id": paths.name,
        "home": str(paths.home),
        "groups": groups,
        "uid": level.uid,
        "copies": [],
        "stage": None,
        "landlock": None,
        "reveal": [],
        "seccomp": None,
        "nested": level.isolation == "bubblewrap",
        "env": {"PATH": os.defpath, "LC_ALL": "C"},
        "cwd": "/",
    }
    files = paths.files(level)
    shown = _plan_files(launch, level, spec, files, origin)
    if level.isolation == "bubblewrap":
        launch["seccomp"] = "pass" if _has_filter(level) else None
        launch["argv"] = _bubblewrap(level, spec, paths, origin, files, shown)
    else:
        launch["argv"] = [str(base_executable()), "-I", "-S", f"{paths.state}/boot/agent.pyc", "{control}"]
        launch["cwd"] = str(files / "work")
        if level.uid is not None:
            launch["reveal"] = [str(interpreter_folder()), *(str(mount.source.absolute()) for mount in spec.mounts)]
        # Even without isolation: one mistaken `kill -1` would end every process of this user.
        launch["seccomp"] = "inherit"
        if level.isolation == "landlock" and "landlock" not in level.without:
            launch["landlock"] = _landlock(spec, paths, files)
    return launch


def _has_filter(level: IsolationLevel) -> bool:
    return "seccomp" not in level.without and seccomp.program(os.uname().machine) is not None


def _plan_files(
    launch: dict[str, Any], level: IsolationLevel, spec: SandboxSpec, files: Path, origin: Origin
) -> list[tuple[str, str]]:
    """Plan the files; return host paths to show inside by bubblewrap, and where."""
    folders = [[name, mode] for name, mode in (*_FOLDERS, *([("root", 0o755)] if origin.image else []))]
    shown = [(str(mount.source.absolute()), mount.target) for mount in spec.mounts]
    shown.append((str(interpreter_folder()), PYTHON))
    copies: list[dict[str, Any]] = []
    overlays: list[dict[str, Any]] = []
    if origin.layers:
        if level.overlay:
            folders += [[f"{origin.top}.upper", 0o755], [f"{origin.top}.ovl", 0o700]]
            lowers = [[str(layer), layer.stat().st_uid] for layer in origin.layers]
            overlays.append({"name": origin.top, "lowers": lowers})
        else:
            source, target = str(origin.layers[0]), str(files / origin.top)
            copies.append({"source": source, "target": target, "owner": level.uid})
    if origin.snapshot is not None:
        for name in SNAPSHOT_FOLDERS:
            copy = {"source": str(origin.snapshot / name), "target": str(files / name), "owner": level.uid}
            copies.append(copy)
    launch["copies"] = copies
    launch["folders"] = {"at": str(files), "names": folders, "owner": level.uid}
    if level.stage is None:
        return shown
    binds: list[tuple[str, str]] = []
    if level.uid is not None and level.isolation == "bubblewrap":
        # Root sees paths that the sandbox's user cannot: it binds each into the private file system.
        binds = [(source, f"shown/{number}") for number, (source, _) in enumerate(shown)]
        shown = [(f"{files}/shown/{number}", target) for number, (_, target) in enumerate(shown)]
    launch["stage"] = {
        "at": str(files),
        "size": spec.limits.disk if "groups" in level.without else min(spec.limits.disk, spec.limits.memory * 7 // 8),
        # An inode takes about 1.2 KB of the memory that is not for contents: more of them would end the sandbox.
        "inodes": max(spec.limits.memory // 16_384, 4_096),
        "userns": level.stage == "user",
        "binds": binds,
        "overlays": overlays,
    }
    return shown


def _bubblewrap(
    level: IsolationLevel,
    spec: SandboxSpec,
    paths: HostPaths,
    origin: Origin,
    files: Path,
    shown: list[tuple[str, str]],
) -> list[str]:
    argv = [level.program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    argv += ["--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox"]
    uid = USER_ID if origin.image is None else 0
    argv += ["--uid", str(uid), "--gid", str(uid)]
    if "userns" not in level.without:
        argv += ["--disable-userns"]
    if spec.limits.network or "network" in level.without:
        argv += ["--share-net"]
    argv += _root(paths, origin, files)
    if spec.limits.network:
        argv += ["--ro-bind-try", os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"]
    argv += ["--proc", "/proc"]
    if "procsys" not in level.without:
        argv += ["--ro-bind", "/proc/sys", "/proc/sys"]
    argv += ["--dev", "/dev", "--bind", str(files / "shm"), "/dev/shm"]
    argv += ["--bind", str(files / "tmp"), "/tmp", "--bind", str(files / "vartmp"), "/var/tmp"]
    argv += ["--bind", str(files / "home"), HOME]
    if origin.image is None:
        argv += ["--bind", str(files / "work"), spec.workdir]
    else:
        argv += ["--dir", spec.workdir]
    for source, target in shown:
        argv += ["--ro-bind", source, target]
    argv += ["--ro-bind", str(paths.state / "boot"), BOOT]
    if origin.image is not None:
        argv += ["--ro-bind", str(paths.state / "lib"), LIBRARIES]
    if "readonly" not in level.without:
        argv += ["--remount-ro", "/dev", *(["--remount-ro", "/"] if origin.image is None else [])]
    if _has_filter(level):
        argv += ["--seccomp", "{seccomp}"]
    argv += ["--setenv", "LD_LIBRARY_PATH", f"{PYTHON}/lib", "--chdir", "/", "--"]
    program = f"{PYTHON}/{base_executable().relative_to(interpreter_folder())}"
    loader = [f"{LIBRARIES}/loader", "--library-path", LIBRARIES] if origin.image is not None else []
    return [*argv, *loader, program, "-I", "-S", f"{BOOT}/agent.pyc", "{control}"]


def _root(paths: HostPaths, origin: Origin, files: Path) -> list[str]:
    """Return bubblewrap's arguments for the root file system."""
    if origin.image is not None:
        return ["--bind", str(files / "root"), "/"]
    argv: list[str] = []
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            argv += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            argv += ["--ro-bind", folder, folder]
    argv += ["--ro-bind", str(paths.state / "etc"), "/etc"]
    for name in _ETC_FOLDERS:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return argv


def _landlock(spec: SandboxSpec, host_paths: HostPaths, files: Path) -> dict[str, Any]:
    reading = [
        *_SYSTEM_FOLDERS,
        *(f"/etc/{name}" for name in (*_ETC_FOLDERS, *COPIED_ETC_FILES)),
        "/proc",
        "/sys/devices/system/cpu",
        "/etc/passwd",
    ]
    reading += ["/etc/group", "/etc/nsswitch.conf", "/etc/hosts", "/dev/urandom", "/dev/random", "/dev/zero"]
    if spec.limits.network:
        reading += [os.path.realpath("/etc/resolv.conf")]
    reading += [
        str(interpreter_folder()),
        str(host_paths.state / "boot"),
        *(str(mount.source.absolute()) for mount in spec.mounts),
    ]
    paths: list[list[Any]] = [[path, False] for path in reading]
    paths += [["/dev/null", "device"], ["/dev/full", "device"], ["/dev/tty", "device"], ["/dev/ptmx", "device"]]
    paths += [["/dev/pts", "device"], [str(files), True]]
    return {"paths": paths, "network": spec.limits.network}


def hello_message(level: IsolationLevel, spec: SandboxSpec, paths: HostPaths, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the first message to the agent: limits and environment of commands."""
    limits = spec.limits
    shares_host = level.isolation != "bubblewrap"
    agent_limits = {"RLIMIT_FSIZE": limits.file_size, "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0}
    command_limits: dict[str, int] = {}
    counted_pids = 0
    if "pids" not in level.without and not shares_host:
        agent_limits["RLIMIT_NPROC"] = limits.pids + RESERVE
        command_limits["RLIMIT_NPROC"] = limits.pids
    elif "pids" not in level.without and level.groups.pids is None:
        # The kernel would count all processes of this user, in and outside of the sandbox.
        counted_pids = limits.pids
    if limits.cpu_seconds is not None:
        command_limits["RLIMIT_CPU"] = max(1, round(limits.cpu_seconds))
    watched = level.groups.memory is None and "watch" not in level.without
    if watched:
        agent_limits["RLIMIT_DATA"] = limits.memory
    files = paths.files(level)
    workdir = str(files / "work") if shares_host else spec.workdir
    return {
        "op": "hello",
        "rlimits": agent_limits,
        "command_rlimits": command_limits,
        "watch": limits.memory if watched else 0,
        "count": counted_pids,
        "workdir": workdir,
        "env": {
            "PATH": SYSTEM_PATH,
            "HOME": str(files / "home") if shares_host else HOME,
            "TMPDIR": str(files / "tmp") if shares_host else "/tmp",
            "USER": USER,
            "LOGNAME": USER,
            "LANG": "C.UTF-8",
            **env,
        },
    }


def check_spec(spec: SandboxSpec) -> None:
    """Check the paths and options of a spec; SandboxUnavailable names what is impossible."""
    if not spec.workdir.startswith("/") or os.path.normpath(spec.workdir) == "/":
        raise SandboxUnavailable(f"workdir is {spec.workdir!r}: give an absolute path below /, such as /work")
    check_sources(spec)
    for mount in spec.mounts:
        if not mount.target.startswith("/"):
            raise SandboxUnavailable(f"the mount of {str(mount.source)!r} has the relative target {mount.target!r}")
