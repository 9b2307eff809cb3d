"""The sandbox checker: the table of checks and attacks, and their execution."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError
from turnwise.ext.checks.sandbox import commands, files, lifecycle
from turnwise.ext.checks.sandbox import commands as persistence
from turnwise.ext.checks.sandbox import files as trees
from turnwise.ext.checks.sandbox.attacks import ATTACKS, Attack
from turnwise.ext.checks.sandbox.context import (
    SECRET,
    CheckContext,
    CheckFailed,
    CheckSkipped,
    Outcome,
    SandboxReport,
    Status,
)
from turnwise.ext.checks.sandbox.fixtures import Fixtures, planted
from turnwise.sandboxes.config import SandboxConfig, open_backend
from turnwise.sandboxes.core import SandboxBackend, SandboxSpec

CHECKS: Final[dict[str, Callable[[CheckContext], Awaitable[None]]]] = {
    "exec: exit codes": commands.exit_codes,
    "exec: signals": commands.signals,
    "exec: missing program": commands.missing_program,
    "exec: streams": commands.streams,
    "exec: binary output": commands.binary,
    "exec: arguments": commands.arguments,
    "exec: long arguments": commands.long_argument,
    "exec: folders": commands.folders,
    "exec: bad folder": commands.bad_folder,
    "exec: variables": commands.variables,
    "exec: host environment": commands.host_environment,
    "exec: input": commands.stdin,
    "exec: long input": commands.long_stdin,
    "exec: cut output": commands.cut,
    "exec: uncut output": commands.uncut,
    "exec: much output": commands.much_output,
    "exec: together": commands.together,
    "exec: duration": commands.duration,
    "exec: user": commands.user,
    "time-out: result": persistence.timeout,
    "time-out: tree": persistence.timeout_tree,
    "time-out: endless output": persistence.timeout_spam,
    "time-out: spares others": persistence.timeout_spares,
    "cancellation": persistence.cancellation,
    "background: lives on": persistence.background,
    "background: output": persistence.background_output,
    "spawn: interactive": persistence.spawned,
    "spawn: streams": persistence.spawn_streams,
    "spawn: folder and variables": persistence.spawn_place,
    "spawn: missing program": persistence.spawn_missing,
    "spawn: interrupt": persistence.spawn_interrupt,
    "spawn: kill": persistence.spawn_kill,
    "spawn: volume": persistence.spawn_volume,
    "files: round trip": files.round_trip,
    "files: large": files.large,
    "files: overwriting": files.overwriting,
    "files: places": files.places,
    "files: owner": files.owner,
    "files: names": files.names,
    "files: modes": files.modes,
    "files: missing": files.missing,
    "files: no file": files.no_file,
    "files: too large": files.too_large,
    "files: forbidden": files.forbidden,
    "files: links": files.links,
    "files: size limit": files.size_limit,
    "trees: upload": trees.upload,
    "trees: merge": trees.merge,
    "trees: upload of what is missing": trees.upload_missing,
    "trees: download": trees.download,
    "trees: many files": trees.many_files,
    "trees: download of what is missing or large": trees.download_missing,
    "trees: what changes": trees.changing,
    "trees: workspace": trees.workspace,
    "trees: missing workspace": trees.workspace_missing,
    "trees: mounts": trees.mounts,
    "life: identity": lifecycle.identity,
    "life: close": lifecycle.closing,
    "life: close during a command": lifecycle.close_during,
    "life: close ends all": lifecycle.close_ends_all,
    "life: cancelled start": lifecycle.start_cancelled,
    "life: refused start": lifecycle.start_refused,
    "life: workdir": lifecycle.workdir,
    "life: snapshot": lifecycle.snapshots,
    "life: fork": lifecycle.forks,
    "life: fork processes": lifecycle.fork_processes,
    "life: fork limits": lifecycle.fork_limits,
    "life: expose": lifecycle.exposed,
    "life: reap": lifecycle.reaping,
    "limits: orphans": lifecycle.zombies,
    "limits: processor time": lifecycle.cpu_seconds,
}
"""The checks of the contract by name, in the order in which they run."""


async def check_sandbox(
    backend: SandboxBackend | SandboxConfig | str,
    *,
    spec: SandboxSpec | None = None,
    only: Sequence[str] = (),
    attacks: bool = True,
    timeout: float = 120.0,
    watch: Callable[[Outcome], None] | None = None,
) -> SandboxReport:
    """Check a backend against the contract, and attack the isolation that its capabilities claim.

    The attacks are bounded and harmless, and need a ``python3`` inside. A successful one is a failure if the
    capabilities claim containment, else ``open``.

    Args:
        backend: A backend, its name or its configuration; one that is created here is closed at the end.
        spec: Base spec of the sandboxes; for ``docker`` with the image.
        only: Run only the checks and attacks whose names begin with one of these.
        attacks: Whether to attack.
        timeout: Seconds per check, after which it fails.
        watch: Called with each outcome.

    Raises:
        ConfigError: The backend is unknown or misconfigured, or ``only`` matches no check.
        SandboxUnavailable: The backend is unusable on this machine; the message names the remedy.
    """
    chosen = _chosen(only, attacks)
    config = SandboxConfig(name=backend) if isinstance(backend, str) else backend
    opened = config if isinstance(config, SandboxBackend) else open_backend(config)
    known = None if isinstance(config, SandboxBackend) else config
    asked = spec or SandboxSpec()
    if known is not None:
        asked = known.apply(asked)
    before = os.environ.get(SECRET)
    os.environ[SECRET] = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="turnwise-check-"))
    try:
        capabilities = await opened.probe()
        report = SandboxReport(opened.name, capabilities)
        exam = CheckContext(opened, known, asked, capabilities, folder)
        await _examine(exam, chosen, timeout, report, watch)
        return report
    finally:
        if before is None:
            del os.environ[SECRET]
        else:
            os.environ[SECRET] = before
        shutil.rmtree(folder, ignore_errors=True)
        if opened is not backend:
            await opened.close()


def _chosen(only: Sequence[str], attacks: bool) -> list[str]:
    names = [*CHECKS, *(ATTACKS if attacks else ())]
    for each in only:
        if not any(name.startswith(each) for name in names):
            kinds = ", ".join(sorted({name.partition(":")[0] for name in names}))
            raise ConfigError(f"check_sandbox: only={each!r} is not the prefix of a check's name; known: {kinds}")
    return [name for name in names if not only or name.startswith(tuple(only))]


async def _examine(
    exam: CheckContext,
    chosen: list[str],
    timeout: float,
    report: SandboxReport,
    watch: Callable[[Outcome], None] | None,
) -> None:
    def tell(outcome: Outcome) -> None:
        report.outcomes.append(outcome)
        if watch is not None:
            watch(outcome)

    try:
        for name in chosen:
            if name in CHECKS:
                tell(await _checked(name, CHECKS[name](exam), timeout))
        if any(name in ATTACKS for name in chosen):
            async with planted(exam) as scene:
                for name in chosen:
                    if name in ATTACKS:
                        tell(await _attacked(name, ATTACKS[name], scene, timeout))
    finally:
        await exam.close()


async def _checked(name: str, work: Awaitable[None], timeout: float) -> Outcome:
    status, message, seconds, _ = await _judged(work, timeout)
    return Outcome(name, status, message, "", seconds)


async def _attacked(name: str, attack: Attack, scene: Fixtures, timeout: float) -> Outcome:
    promised = attack.containment == "always" or _promises(scene.exam)[attack.containment]
    status, message, seconds, got = await _judged(attack.run(scene), timeout)
    if status == "passed":
        status = "held" if not got else "escaped" if promised else "open"
        message = "; ".join(got or []) or scene.note
    scene.note = ""
    return Outcome(name, status, message, attack.containment, seconds)


def _promises(exam: CheckContext) -> dict[str, bool]:
    capabilities = exam.capabilities
    return {
        "filesystem": capabilities.filesystem,
        "processes": capabilities.processes,
        "network": capabilities.network and not exam.spec.limits.network,
        "memory": capabilities.memory,
        "pids": capabilities.pids,
        "disk": capabilities.disk,
        "kernel": capabilities.kernel,
    }


async def _judged(work: Awaitable[list[str] | None], timeout: float) -> tuple[Status, str, float, list[str] | None]:
    began = time.monotonic()
    status: Status = "passed"
    message, got = "", None
    try:
        got = await asyncio.wait_for(work, timeout)
    except CheckSkipped as error:
        status, message = "skipped", str(error)
    except CheckFailed as error:
        status, message = "failed", str(error)
    except TimeoutError:
        status, message = "failed", f"did not finish within {timeout:g} s"
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is a finding about it
        status, message = "failed", f"{type(error).__name__}: {error}"
    return status, message, time.monotonic() - began, got
