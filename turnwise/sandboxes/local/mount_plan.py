"""Launch plans of local sandboxes: mounts, files, isolation arguments, and the host's Python."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.core import Mount, SandboxLimits, SandboxSpec
from turnwise.sandboxes.local.boot import seccomp

Isolation = Literal["bubblewrap", "landlock", "plain"]
CGROUPS: Final = Path("/sys/fs/cgroup")
RESERVE: Final = 16
"""Processes on top of what commands may have, for the agent and those that serve one request each."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Parent control groups by controller, None where unusable; ``unified`` is cgroup v2, with one folder for all."""

    memory: Path | None = None
    pids: Path | None = None
    cpu: Path | None = None
    unified: bool = False

    def folders(self) -> list[Path]:
        """Return the distinct folders."""
        return list(dict.fromkeys(each for each in (self.memory, self.pids, self.cpu) if each is not None))

    def plan(self, host: str, name: str, limits: SandboxLimits, reserve: int = RESERVE) -> list[dict[str, Any]]:
        """Return the groups of one sandbox: paths, values by file, and whether each is mandatory."""
        files: dict[Path, list[tuple[str, int | str, bool]]] = {}
        # What lies in the sandbox's files lies in memory, and the agent's own few megabytes count, too.
        if self.memory is not None:
            amount = limits.memory
            own = files.setdefault(self.memory, [])
            if self.unified:
                own += [("memory.max", amount, True), ("memory.swap.max", 0, False), ("memory.oom.group", 0, False)]
            else:
                own += [("memory.limit_in_bytes", amount, True), ("memory.memsw.limit_in_bytes", amount, False)]
        if self.pids is not None:
            files.setdefault(self.pids, []).append(("pids.max", limits.pids + reserve, True))
        if self.cpu is not None and limits.cpus is not None:
            period = 100_000
            quota = max(1000, int(limits.cpus * period))
            own = files.setdefault(self.cpu, [])
            if self.unified:
                own.append(("cpu.max", f"{quota} {period}", True))
            else:
                # A larger quota than a group above has is refused, and that group's holds.
                own += [("cpu.cfs_period_us", period, True), ("cpu.cfs_quota_us", quota, False)]
        names = {"memory": self.memory, "pids": self.pids, "cpu": self.cpu} if self.unified else {}
        controllers = [controller for controller, folder in names.items() if folder is not None]
        return [
            {"path": str(folder / host / name), "limits": wanted, "controllers": controllers}
            for folder, wanted in files.items()
        ]


def find_groups(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Groups:
    """Find usable control groups below ``root``; ``own`` is this process's cgroup file."""
    found: dict[str, Path] = {}
    unified: str | None = None
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return Groups()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            unified = path
        for controller in controllers.split(","):
            if controller in ("memory", "pids", "cpu"):
                place = _writable(root / controller, path)
                if place is not None:
                    found[controller] = place
    if found:
        return Groups(found.get("memory"), found.get("pids"), found.get("cpu"))
    return Groups() if unified is None else _unified(root, unified)


def _writable(mount: Path, path: str) -> Path | None:
    """Return the folder of a v1 controller's group, or the mount root if the group is not visible."""
    for place in (mount / path.lstrip("/"), mount):
        if (place / "cgroup.procs").exists() and os.access(place, os.W_OK):
            return place
    return None


def _unified(root: Path, path: str) -> Groups:
    """Return the nearest limiting ancestor in cgroup v2: groups with processes cannot limit children (but the root)."""
    here = root / path.lstrip("/")
    while here.is_relative_to(root):
        try:
            given = (here / "cgroup.subtree_control").read_text().split()
        except OSError:
            given = []
        if "memory" in given and "pids" in given and os.access(here, os.W_OK):
            return Groups(here, here, here if "cpu" in given else None, unified=True)
        here = here.parent
    return Groups()


@dataclass(frozen=True, slots=True)
class IsolationLevel:
    """One isolation method, as it works on this machine.

    Attributes:
        isolation: Its name.
        uid: User of sandboxes if this process is root; None: its own.
        stage: Private file system mounted before a start: ``root`` (by root's own right), ``user`` (in a user
            namespace), or None (files in the state folder).
        overlay: Whether workspaces are copy-on-write overlays; otherwise copies.
        groups: Available control groups.
        without: Containments switched off by tests that show their effect.
        notes: Gaps of the isolation on this machine.
    """

    isolation: Isolation
    uid: int | None = None
    stage: Literal["root", "user"] | None = None
    overlay: bool = False
    groups: Groups = Groups()
    without: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base_executable() -> Path:
    """Return the base interpreter's program: a virtual environment's copy finds no libraries when mounted alone."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))


def host_python() -> tuple[tuple[Mount, ...], dict[str, str]]:
    """Return mounts and variables that make ``python`` inside this process's interpreter, with its packages.

    Host paths are kept, so that links and absolute paths remain valid. System folders are not mounted: ``local`` shows
    them, and an image has its own.
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
    """Return the base interpreter's program folder, as the virtual environment names it."""
    try:
        for line in (prefix / "pyvenv.cfg").read_text().splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                return Path(value.strip())
    except OSError:
        return None
    return None


USER: Final = "sandbox"
HOME: Final = f"/home/{USER}"
INSIDE: Final = 1000
"""The user's number inside."""
BOOT: Final = "/run/turnwise/boot"
PYTHON: Final = "/run/turnwise/python"
LIBRARIES: Final = "/run/turnwise/lib"
_FOLDERS: Final = (("work", 0o755), ("home", 0o755), ("tmp", 0o1777), ("vartmp", 0o1777), ("shm", 0o1777))
KEPT: Final = ("home", "tmp", "vartmp")
"""Folders that a snapshot keeps besides what a workspace or an image became."""
_ETC: Final = ("alternatives", "ssl", "ca-certificates")
COPIED: Final = ("ld.so.cache", "localtime", "mime.types")
"""Files of the host's ``/etc`` that are copied once: every mount makes a start longer."""
_SYSTEM_FOLDERS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


@dataclass(frozen=True, slots=True)
class Place:
    """The host folders of one sandbox, below the state folder of its host process."""

    state: Path
    name: str
    program: str = ""

    @property
    def home(self) -> Path:
        """The sandbox's folder, removed at its end."""
        return self.state / "boxes" / self.name

    def files(self, rung: IsolationLevel) -> Path:
        """Folder of its files: below ``home``, or in a private file system mounted over that path."""
        return self.home / "files" if rung.stage is None else self.state / "stage"


@dataclass(frozen=True, slots=True)
class Origin:
    """The initial files of a sandbox: an image's root file system (None: the host's programs) and a snapshot, if any.

    ``layers`` are the overlay's lower layers, uppermost first; empty for an empty workdir.
    """

    image: Path | None = None
    snapshot: Path | None = None
    layers: tuple[Path, ...] = ()

    @property
    def top(self) -> str:
        """Name of the folder that is the overlay's upper layer."""
        return "root" if self.image is not None else "work"


def plan(rung: IsolationLevel, spec: SandboxSpec, place: Place, origin: Origin) -> dict[str, Any]:
    """Return the launcher's plan of a sandbox."""
    # Where processes are counted by the group alone, the agent's own are among those that may be.
    reserve = RESERVE if rung.isolation == "bubblewrap" else 0
    groups = rung.groups.plan(place.state.name, place.name, spec.limits, reserve)
    made: dict[str, Any] = {
        "id": place.name,
        "home": str(place.home),
        "groups": groups,
        "uid": rung.uid,
        "copies": [],
        "stage": None,
        "landlock": None,
        "reveal": [],
        "seccomp": None,
        "nested": rung.isolation == "bubblewrap",
        "env": {"PATH": os.defpath, "LC_ALL": "C"},
        "cwd": "/",
    }
    files = place.files(rung)
    seen = _files(made, rung, spec, files, origin)
    if rung.isolation == "bubblewrap":
        made["seccomp"] = "pass" if _filtered(rung) else None
        made["argv"] = _bubblewrap(rung, spec, place, origin, files, seen)
    else:
        made["argv"] = [str(base_executable()), "-I", "-S", f"{place.state}/boot/agent.pyc", "{control}"]
        made["cwd"] = str(files / "work")
        if rung.uid is not None:
            made["reveal"] = [str(interpreter()), *(str(mount.source.absolute()) for mount in spec.mounts)]
        # Also where nothing is held back: one `kill -1` by mistake would end every process of this user.
        made["seccomp"] = "inherit"
        if rung.isolation == "landlock" and "landlock" not in rung.without:
            made["landlock"] = _landlock(spec, place, files)
    return made


def _filtered(rung: IsolationLevel) -> bool:
    return "seccomp" not in rung.without and seccomp.program(os.uname().machine) is not None


def _files(
    made: dict[str, Any], rung: IsolationLevel, spec: SandboxSpec, files: Path, origin: Origin
) -> list[tuple[str, str]]:
    """Plan the files; return host paths to show inside, and where the launcher binds them."""
    folders = [[name, mode] for name, mode in (*_FOLDERS, *([("root", 0o755)] if origin.image else []))]
    wanted = [(str(mount.source.absolute()), mount.target) for mount in spec.mounts]
    copies: list[dict[str, Any]] = []
    overlays: list[dict[str, Any]] = []
    if origin.layers:
        if rung.overlay:
            folders += [[f"{origin.top}.upper", 0o755], [f"{origin.top}.ovl", 0o700]]
            lowers = [[str(layer), layer.stat().st_uid] for layer in origin.layers]
            overlays.append({"name": origin.top, "lowers": lowers})
        else:
            source, target = str(origin.layers[0]), str(files / origin.top)
            copies.append({"source": source, "target": target, "owner": rung.uid})
    if origin.snapshot is not None:
        for name in KEPT:
            kept = {"source": str(origin.snapshot / name), "target": str(files / name), "owner": rung.uid}
            copies.append(kept)
    made["copies"] = copies
    made["folders"] = {"at": str(files), "names": folders, "owner": rung.uid}
    if rung.stage is None:
        return wanted
    # Root sees what the sandbox's user does not: it shows each to it at a place of the private file system.
    pairs = [(source, f"shown/{number}") for number, (source, _) in enumerate(_shown(wanted, rung))]
    made["stage"] = {
        "at": str(files),
        "size": spec.limits.disk if "groups" in rung.without else min(spec.limits.disk, spec.limits.memory * 7 // 8),
        "userns": rung.stage == "user",
        "binds": pairs,
        "overlays": overlays,
    }
    shown = [(f"{files}/shown/{number}", target) for number, (_, target) in enumerate(_shown(wanted, rung))]
    return shown or wanted


def _shown(wanted: list[tuple[str, str]], rung: IsolationLevel) -> list[tuple[str, str]]:
    if rung.stage is None or rung.uid is None or rung.isolation != "bubblewrap":
        return []
    return [*wanted, (str(interpreter()), PYTHON)]


def interpreter() -> Path:
    """Return the folder of this process's interpreter, which runs the agent."""
    return base_executable().parents[1]


def _bubblewrap(
    rung: IsolationLevel, spec: SandboxSpec, place: Place, origin: Origin, files: Path, seen: list[tuple[str, str]]
) -> list[str]:
    argv = [place.program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    argv += ["--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox"]
    inside = INSIDE if origin.image is None else 0
    argv += ["--uid", str(inside), "--gid", str(inside)]
    if "userns" not in rung.without:
        argv += ["--disable-userns"]
    if spec.limits.network or "network" in rung.without:
        argv += ["--share-net"]
    argv += _root(place, origin, files)
    if spec.limits.network:
        argv += ["--ro-bind-try", os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"]
    argv += ["--proc", "/proc"]
    if "procsys" not in rung.without:
        argv += ["--ro-bind", "/proc/sys", "/proc/sys"]
    argv += ["--dev", "/dev", "--bind", str(files / "shm"), "/dev/shm"]
    argv += ["--bind", str(files / "tmp"), "/tmp", "--bind", str(files / "vartmp"), "/var/tmp"]
    argv += ["--bind", str(files / "home"), HOME]
    if origin.image is None:
        argv += ["--bind", str(files / "work"), spec.workdir]
    else:
        argv += ["--dir", spec.workdir]
    python = str(interpreter())
    inner = [pair for pair in seen if pair[1] == PYTHON] or [(python, PYTHON)]
    for source, target in (*(pair for pair in seen if pair[1] != PYTHON), *inner):
        argv += ["--ro-bind", source, target]
    argv += ["--ro-bind", str(place.state / "boot"), BOOT]
    if origin.image is not None:
        argv += ["--ro-bind", str(place.state / "lib"), LIBRARIES]
    if "readonly" not in rung.without:
        argv += ["--remount-ro", "/dev", *(["--remount-ro", "/"] if origin.image is None else [])]
    if _filtered(rung):
        argv += ["--seccomp", "{seccomp}"]
    argv += ["--setenv", "LD_LIBRARY_PATH", f"{PYTHON}/lib", "--chdir", "/", "--"]
    program = f"{PYTHON}/{base_executable().relative_to(python)}"
    loader = [f"{LIBRARIES}/loader", "--library-path", LIBRARIES] if origin.image is not None else []
    return [*argv, *loader, program, "-I", "-S", f"{BOOT}/agent.pyc", "{control}"]


def _root(place: Place, origin: Origin, files: Path) -> list[str]:
    """Return bubblewrap's arguments for the root file system."""
    if origin.image is not None:
        return ["--bind", str(files / "root"), "/"]
    argv: list[str] = []
    for each in _SYSTEM_FOLDERS:
        if os.path.islink(each):
            argv += ["--symlink", os.readlink(each), each]
        elif os.path.isdir(each):
            argv += ["--ro-bind", each, each]
    argv += ["--ro-bind", str(place.state / "etc"), "/etc"]
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return argv


def _landlock(spec: SandboxSpec, place: Place, files: Path) -> dict[str, Any]:
    reading = [
        *_SYSTEM_FOLDERS,
        *(f"/etc/{name}" for name in (*_ETC, *COPIED)),
        "/proc",
        "/sys/devices/system/cpu",
        "/etc/passwd",
    ]
    reading += ["/etc/group", "/etc/nsswitch.conf", "/etc/hosts", "/dev/urandom", "/dev/random", "/dev/zero"]
    if spec.limits.network:
        reading += [os.path.realpath("/etc/resolv.conf")]
    reading += [str(interpreter()), str(place.state / "boot"), *(str(mount.source.absolute()) for mount in spec.mounts)]
    paths: list[list[Any]] = [[path, False] for path in reading]
    paths += [["/dev/null", "device"], ["/dev/full", "device"], ["/dev/tty", "device"], ["/dev/ptmx", "device"]]
    paths += [["/dev/pts", "device"], [str(files), True]]
    return {"paths": paths, "network": spec.limits.network}


def greeting(rung: IsolationLevel, spec: SandboxSpec, place: Place, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the first message to the agent: limits and environment of commands."""
    limits = spec.limits
    shared = rung.isolation != "bubblewrap"
    bounded = {"RLIMIT_FSIZE": limits.file_size, "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0}
    own: dict[str, int] = {}
    counted = 0
    if "pids" not in rung.without and not shared:
        bounded["RLIMIT_NPROC"] = limits.pids + RESERVE
        own["RLIMIT_NPROC"] = limits.pids
    elif "pids" not in rung.without and rung.groups.pids is None:
        # The kernel would count all processes of this user, wherever they run: that is no bound of a sandbox.
        counted = limits.pids
    if limits.cpu_seconds is not None:
        own["RLIMIT_CPU"] = max(1, round(limits.cpu_seconds))
    watched = rung.groups.memory is None and "watch" not in rung.without
    if watched:
        bounded["RLIMIT_DATA"] = limits.memory
    files = place.files(rung)
    workdir = str(files / "work") if shared else spec.workdir
    return {
        "op": "hello",
        "rlimits": bounded,
        "command_rlimits": own,
        "watch": limits.memory if watched else 0,
        "count": counted,
        "workdir": workdir,
        "env": {
            "PATH": SYSTEM_PATH,
            "HOME": str(files / "home") if shared else HOME,
            "TMPDIR": str(files / "tmp") if shared else "/tmp",
            "USER": USER,
            "LOGNAME": USER,
            "LANG": "C.UTF-8",
            **env,
        },
    }


def check(spec: SandboxSpec) -> None:
    """Check the paths and options of a spec; SandboxUnavailable names what is impossible."""
    if not spec.workdir.startswith("/") or os.path.normpath(spec.workdir) == "/":
        raise SandboxUnavailable(f"workdir is {spec.workdir!r}: give an absolute path below /, such as /work")
    if spec.workspace is not None and not spec.workspace.is_dir():
        raise SandboxUnavailable(f"workspace {str(spec.workspace)!r} is not a folder on this machine")
    for mount in spec.mounts:
        if not mount.target.startswith("/"):
            raise SandboxUnavailable(f"the mount of {str(mount.source)!r} is seen at {mount.target!r}: not absolute")
        if not mount.source.exists():
            raise SandboxUnavailable(f"the mount {str(mount.source)!r} (seen at {mount.target}) does not exist")


def check_python(version: int) -> None:
    """Raise SandboxUnavailable unless the agent's ``sys.hexversion`` is of the same minor version as this process's."""
    if version >> 16 != sys.hexversion >> 16:
        found = ".".join(str(version >> shift & 0xFF) for shift in (24, 16, 8))
        raise SandboxUnavailable(
            f"inside a sandbox Python is {found}, and this process runs on {sys.version.split()[0]}: the standard "
            f"library or libpython of {base_executable()} is not below {interpreter()}, the only folder of it that "
            "sandboxes are shown. Make the virtual environment from an interpreter that is installed in one folder"
        )
