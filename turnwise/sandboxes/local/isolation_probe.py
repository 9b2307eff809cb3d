"""Selection of the strongest isolation that works, by starting a sandbox with each."""

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
from turnwise.sandboxes.local.mount_plan import Groups, IsolationLevel, find_groups
from turnwise.sandboxes.local.sandbox import LocalSandbox, SandboxHost, SandboxStartTimeout

logger = logging.getLogger(__name__)

_REMEDY: Final = (
    "Install bubblewrap (apt-get install bubblewrap) and allow user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0; in a container "
    "--cap-add SYS_ADMIN), or run on a kernel with Landlock (5.13 or newer), or choose the docker backend "
    "(sandbox.name: docker)"
)


async def select_isolation(
    backend: SandboxHost, wanted: str, uid: int | None, without: frozenset[str]
) -> tuple[IsolationLevel, Capabilities]:
    """Return the strongest working isolation level (weaker ones only if named).

    Raises:
        SandboxUnavailable: None works.
        SandboxStartError: It is not known, since the launcher died, or (SandboxStartTimeout) a sandbox took too long.
    """
    reasons: list[str] = []
    groups = Groups() if "groups" in without else find_groups()
    for rung, program in _with_and_without_groups(_candidates(wanted, uid, groups, without, reasons)):
        backend.try_rung(rung, program)
        try:
            capabilities = await _try_isolation(backend, rung)
        except SandboxStartTimeout:
            raise  # a machine that is slow is not one without this isolation
        except SandboxError as error:
            reasons.append(f"{rung.isolation}: {error}")
            if backend.launcher.dead:
                break
            continue
        if rung.isolation == "plain":
            logger.warning("sandboxes are NOT isolated (isolation: plain, unsafe)")
        elif rung.isolation == "landlock":
            logger.warning(
                "sandboxes are isolated by Landlock alone: %s. %s", "; ".join(capabilities.notes), " ".join(reasons)
            )
        else:
            logger.info("sandboxes are isolated by bubblewrap")
        return rung, capabilities
    if backend.launcher.dead:
        # Nothing is known of this machine: a killed launcher takes every probe with it, and may be started again.
        raise SandboxStartError(f"the sandbox launcher died while isolation was probed. {' '.join(reasons)}")
    raise SandboxUnavailable(f"no isolation for local sandboxes. {' '.join(reasons)} {_REMEDY}")


def _with_and_without_groups(candidates: Iterator[tuple[IsolationLevel, str]]) -> Iterator[tuple[IsolationLevel, str]]:
    """Retry each candidate without control groups: creating one may fail."""
    for rung, program in candidates:
        yield rung, program
        if rung.groups.folders():
            yield replace(rung, groups=Groups()), program


def _candidates(
    wanted: str, uid: int | None, groups: Groups, without: frozenset[str], reasons: list[str]
) -> Iterator[tuple[IsolationLevel, str]]:
    program = shutil.which("bwrap")
    if wanted in ("auto", "bubblewrap"):
        if program is None:
            reasons.append("bubblewrap: there is no program bwrap on PATH.")
        else:
            program = os.path.abspath(program)  # the launcher is in another folder
            # Older ones cannot forbid user namespaces inside; the filter of system calls does that, too.
            old = frozenset() if _version(program) >= (0, 8) else frozenset({"userns"})
            base = IsolationLevel("bubblewrap", uid, groups=groups, without=without | old)
            if uid is not None:
                yield replace(base, stage="root", overlay=True), program
                # Root that may not mount, as in most containers. An overlay would show the owners of files as they are.
                yield replace(base, stage="user"), program
            # Where this process is root, its sandboxes stay root's: only if it cannot become another user.
            yield replace(base, stage="user", overlay=True, uid=None), program
            if uid is None:
                yield base, program
    if wanted in ("auto", "landlock"):
        if landlock.version():
            base = IsolationLevel("landlock", uid, groups=groups, without=without)
            if uid is not None:
                yield replace(base, stage="root", overlay=True), ""
            yield base, ""
        else:
            reasons.append(f"landlock: this kernel ({platform.release()}) has none.")
    if wanted == "plain":
        yield IsolationLevel("plain", None, groups=groups, without=without), ""


def _version(program: str) -> tuple[int, ...]:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return ()
    except subprocess.TimeoutExpired as error:
        raise SandboxStartTimeout(f"{program} --version did not answer within {error.timeout:g} s") from error
    return tuple(int(number) for number in re.findall(r"\d+", done.stdout)[:3])


async def _try_isolation(backend: SandboxHost, rung: IsolationLevel) -> Capabilities:
    """Start a sandbox at a level, probe it from inside, and return its capabilities."""
    workspace = backend.place("probe").state / "probe"
    workspace.mkdir(exist_ok=True)
    (workspace / "file").write_text("seen")
    # A launcher that was killed leaves its sandbox's folder: the next probe takes another name.
    name = f"{backend.place('probe').state.name}-probe-{secrets.token_hex(3)}"
    sandbox = LocalSandbox(backend, SandboxSpec(workspace=workspace), name)
    try:
        await sandbox.launch()
        seen = await sandbox.exec("cat file && echo changed > file && cat /proc/self/mounts")
        if seen.timed_out:
            raise SandboxStartTimeout("a sandbox did not read and write a file within 30 s")
        if not seen.ok or not seen.stdout.startswith(b"seen"):
            raise SandboxStartError(f"a file was not seen or not writable: {seen.text.strip()}")
    finally:
        await sandbox.close()
    return _capabilities(rung, overlay=b"/work overlay " in seen.stdout)


def _is_root() -> bool:
    """Whether this process's user is root outside of its user namespace, too."""
    if os.geteuid():
        return False
    with open("/proc/self/uid_map") as file:
        return ["0", "0"] in [line.split()[:2] for line in file]


def _capabilities(rung: IsolationLevel, overlay: bool) -> Capabilities:
    strong = rung.isolation == "bubblewrap"
    notes: list[str] = []
    memory = rung.groups.memory is not None
    if not memory:
        notes.append(
            "no control group bounds memory: each process is bounded by itself, and all together are looked after ten "
            "times a second"
        )
    if rung.groups.pids is None and not strong:
        notes.append("no control group bounds processes: they are counted ten times a second")
    if rung.groups.cpu is None:
        notes.append("no control group bounds processors: limits.cpus does not hold")
    filtered = seccomp.program(platform.machine()) is not None
    if not filtered:
        notes.append(f"no filter of system calls is known for {platform.machine()}")
    if strong:
        return _of_bubblewrap(rung, overlay, filtered, notes)
    version = landlock.version() if rung.isolation == "landlock" else 0
    contained = rung.isolation == "landlock"
    bounded = rung.stage is not None
    if contained:
        if version < 4:
            notes.append(f"Landlock {version} leaves TCP open (4 or newer: Linux 6.7)")
        if version < 6:
            notes.append(f"Landlock {version} leaves signals and abstract sockets open (6 or newer: Linux 6.12)")
        notes.append(
            "UDP, the machine's process list and System V IPC are in reach, and the workdir is not where the spec "
            "names it"
        )
        if not bounded:
            notes.append("no file system of bounded size is allowed here: limits.disk does not hold")
    else:
        notes.append("whatever this user may do, code inside may do")
    return Capabilities(
        rung.isolation,
        filesystem=contained,
        processes=False,
        network=False,
        memory=memory,
        pids=rung.groups.pids is not None,
        disk=bounded,
        kernel=False,
        snapshots=True,
        expose=False,
        images=False,
        notes=tuple(notes),
    )


def _of_bubblewrap(rung: IsolationLevel, overlay: bool, filtered: bool, notes: list[str]) -> Capabilities:
    if not overlay:
        notes.append("workspaces are copied: an overlay is not allowed here")
    if rung.stage is None:
        notes.append("no file system of bounded size is allowed here: limits.disk does not hold")
    as_root = rung.uid is None and _is_root()
    pids = not as_root or rung.groups.pids is not None
    if as_root:
        notes.append(
            "sandboxes run as root, which the kernel lets read and change more than others: run as one of them"
        )
    if not pids:
        notes.append(
            "no control group bounds processes, and the kernel counts none of root's: limits.pids does not hold"
        )
    return Capabilities(
        "bubblewrap", pids=pids, disk=rung.stage is not None, kernel=filtered and not as_root, notes=tuple(notes)
    )
