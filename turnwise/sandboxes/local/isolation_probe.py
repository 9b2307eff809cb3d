"""Selection of the isolation: the strongest variant of it that works, by starting a sandbox with each."""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from turnwise.errors import SandboxError, SandboxStartError, SandboxUnavailable
from turnwise.sandboxes.core import Capabilities, SandboxSpec
from turnwise.sandboxes.local.boot import landlock, seccomp
from turnwise.sandboxes.local.control_groups import ControlGroups, find_groups
from turnwise.sandboxes.local.launch_plan import IsolationLevel
from turnwise.sandboxes.local.sandbox import LocalSandbox, SandboxHost, SandboxStartTimeout

logger = logging.getLogger(__name__)

_REMEDY: Final = (
    "Install bubblewrap (apt-get install bubblewrap) and allow user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0; in a container "
    "--cap-add SYS_ADMIN), or choose the docker backend (sandbox.name: docker), or accept less isolation with "
    "sandbox.config.isolation: landlock (Linux 5.13 or newer), which leaves modes of this user's files outside, unix "
    "sockets and the list of processes open"
)


async def select_isolation(
    backend: SandboxHost, isolation: str, uid: int | None, without: frozenset[str]
) -> tuple[IsolationLevel, Capabilities]:
    """Return the strongest working isolation level; one weaker than bubblewrap only if it is named.

    Raises:
        SandboxUnavailable: None works.
        SandboxStartError: The launcher died, or (SandboxStartTimeout) a sandbox took too long, so nothing is known.
    """
    reasons: list[str] = []
    groups = ControlGroups() if "groups" in without else find_groups()
    for level in _with_and_without_groups(_candidates(isolation, uid, groups, without, reasons)):
        backend.try_level(level)
        try:
            capabilities = await _try_isolation(backend, level)
        except SandboxStartTimeout:
            raise  # a slow machine may still have this isolation
        except SandboxError as error:
            reasons.append(f"{level.isolation}: {error}")
            if backend.launcher.dead:
                break
            continue
        if level.isolation == "plain":
            logger.warning("sandboxes are NOT isolated (isolation: plain, unsafe)")
        elif level.isolation == "landlock":
            logger.warning(
                "sandboxes are isolated by Landlock alone: %s. %s", "; ".join(capabilities.notes), " ".join(reasons)
            )
        else:
            logger.info("sandboxes are isolated by bubblewrap")
        return level, capabilities
    if backend.launcher.dead:
        # A killed launcher ends every probe, which says nothing about this machine: it may be started again.
        raise SandboxStartError(f"the sandbox launcher died while isolation was probed. {' '.join(reasons)}")
    raise SandboxUnavailable(f"no isolation for local sandboxes. {' '.join(reasons)} {_REMEDY}")


def _with_and_without_groups(candidates: Iterator[IsolationLevel]) -> Iterator[IsolationLevel]:
    """Retry each candidate without control groups: creating one may fail."""
    for level in candidates:
        yield level
        if level.groups.folders():
            yield replace(level, groups=ControlGroups())


def _candidates(
    isolation: str, uid: int | None, groups: ControlGroups, without: frozenset[str], reasons: list[str]
) -> Iterator[IsolationLevel]:
    program = shutil.which("bwrap")
    if isolation in ("auto", "bubblewrap"):
        if program is None:
            reasons.append("bubblewrap: there is no program bwrap on PATH.")
        else:
            program = os.path.abspath(program)  # the launcher is in another folder
            # Older versions cannot forbid user namespaces inside; the system call filter forbids them, too.
            unsupported = frozenset() if _version(program) >= (0, 8) else frozenset({"userns"})
            base = IsolationLevel("bubblewrap", uid, program, groups=groups, without=without | unsupported)
            if uid is not None:
                yield replace(base, stage="root", overlay=True)
                # Root without the right to mount, as in most containers: an overlay would show the files' real owners.
                yield replace(base, stage="user")
            # Sandboxes of root run as root only if it cannot become another user.
            yield replace(base, stage="user", overlay=True, uid=None)
            if uid is None:
                yield base
    if isolation == "landlock":
        if landlock.version():
            base = IsolationLevel("landlock", uid, groups=groups, without=without)
            if uid is not None:
                yield replace(base, stage="root", overlay=True)
            yield base
        else:
            reasons.append(f"landlock: this kernel ({platform.release()}) has none.")
    if isolation == "plain":
        yield IsolationLevel("plain", None, groups=groups, without=without)


def _version(program: str) -> tuple[int, ...]:
    try:
        result = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return ()
    except subprocess.TimeoutExpired as error:
        raise SandboxStartTimeout(f"{program} --version did not answer within {error.timeout:g} s") from error
    return tuple(int(number) for number in re.findall(r"\d+", result.stdout)[:3])


async def _try_isolation(backend: SandboxHost, level: IsolationLevel) -> Capabilities:
    """Start a sandbox at a level, probe it from inside, and return its capabilities."""
    workspace = backend.paths("probe").state / "probe"
    workspace.mkdir(exist_ok=True)
    (workspace / "file").write_text("seen")
    # A killed launcher leaves its sandbox's folder, so each probe has its own name.
    name = f"{backend.paths('probe').state.name}-probe-{secrets.token_hex(3)}"
    sandbox = LocalSandbox(backend, SandboxSpec(workspace=workspace), name)
    try:
        await sandbox.launch()
        result = await sandbox.exec("cat file && echo changed > file && cat /proc/self/mounts")
        if result.timed_out:
            raise SandboxStartTimeout("a sandbox did not read and write a file within 30 s")
        if not result.ok or not result.stdout.startswith(b"seen"):
            raise SandboxStartError(f"a file was not seen or not writable: {result.text.strip()}")
    finally:
        await sandbox.close()
    return _capabilities(level, overlay=b"/work overlay " in result.stdout)


def _is_root() -> bool:
    """Whether this process's user is root outside of its user namespace, too."""
    if os.geteuid():
        return False
    with open("/proc/self/uid_map") as file:
        return ["0", "0"] in [line.split()[:2] for line in file]


def _capabilities(level: IsolationLevel, overlay: bool) -> Capabilities:
    strong, contained = level.isolation == "bubblewrap", level.isolation != "plain"
    groups, bounded, version = level.groups, level.stage is not None, landlock.version()
    filtered = seccomp.program(platform.machine()) is not None
    as_root = strong and level.uid is None and _is_root()
    pids = groups.pids is not None or (strong and not as_root)
    by_landlock = level.isolation == "landlock"
    gaps = {
        "no control group bounds memory: each process is bounded on its own, and their total is checked ten times a "
        "second": groups.memory is None,
        "no control group bounds processes: they are counted ten times a second": not strong and not pids,
        "no control group bounds processors: limits.cpus does not hold": groups.cpu is None,
        f"no filter of system calls is known for {platform.machine()}": not filtered,
        f"Landlock {version} leaves TCP open (4 or newer: Linux 6.7)": by_landlock and version < 4 and not filtered,
        f"Landlock {version} leaves signals and abstract sockets open (6 or newer: Linux 6.12)": by_landlock
        and version < 6,
        "all networks but TCP are accessible": by_landlock and not filtered,
        "modes, owners and times of this user's files outside may be changed, unix sockets at a path, the machine's "
        "process list and System V IPC are accessible, and the workdir is not where the spec names it": by_landlock,
        "workspaces are copied: an overlay is not allowed here": strong and not overlay,
        "no file system of bounded size is allowed here: limits.disk does not hold": contained and not bounded,
        "code inside has all rights of this user": not contained,
        "sandboxes have one user, whose pipes, inotify instances and descriptors in flight one of them can use up: as "
        "root, each has its own": level.uid is None,
        "sandboxes run as root, which may read and change more than other users: run this process as another user": (
            as_root
        ),
        "no control group bounds processes, and the kernel counts none of root's: limits.pids does not hold": strong
        and not pids,
    }
    return Capabilities(
        level.isolation,
        filesystem=strong,
        processes=strong,
        network=strong,
        memory=groups.memory is not None or strong,
        pids=pids,
        disk=bounded,
        kernel=strong and filtered and not as_root,
        siblings=level.uid is not None,
        expose=strong,
        images=strong,
        notes=tuple(note for note, holds in gaps.items() if holds),
    )
