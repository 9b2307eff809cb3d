"""Attacks by programs that run inside, on resource limits, and by processes that outlive their command or host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from turnwise.errors import SandboxDied, SandboxError
from turnwise.ext.checks.sandbox.context import (
    CheckContext,
    host_processes,
    keeps_writing,
    lines_written,
    processes_ended,
    stopped_writing,
)
from turnwise.ext.checks.sandbox.link_attacks import changes_outside
from turnwise.ext.checks.sandbox.report import CheckFailed, CheckSkipped
from turnwise.sandboxes.core import SandboxLimits

Attack = Callable[[CheckContext], Awaitable[list[str]]]
"""Makes an attack and returns its findings, none if it was contained."""

_MIB: Final = 2**20
_LIMITS: Final = SandboxLimits(memory=256 * _MIB, pids=64, disk=48 * _MIB, file_size=16 * _MIB)
"""Limits of the sandboxes whose limits are attacked: small, so that an uncontained attack stays harmless."""


def program(name: str, **options: Any) -> Attack:
    """Return the attack by one of the programs (``programs.py``), run in the shared sandbox."""

    async def attack(context: CheckContext) -> list[str]:
        return await context.host.run_program(await context.sandbox(), name, options)

    return attack


def connection(name: str, **options: Any) -> Attack:
    """Return the attack by a program that connects to a server of the host, which reports what arrived."""

    async def attack(context: CheckContext) -> list[str]:
        await context.host.run_program(await context.sandbox(), name, options)
        return await context.host.received(name)

    return attack


def overuse(name: str, *, may_die: bool = False, **options: Any) -> Attack:
    """Return the attack of a program on limits, in a small sandbox; ``may_die``: its death counts as containment."""

    async def attack(context: CheckContext) -> list[str]:
        async with context.fresh(limits=_LIMITS) as sandbox:
            try:
                findings = await context.host.run_program(sandbox, name, options, may_die=may_die)
                # Processes of the attack end within their own alarm of 30 s: from then on commands must run again.
                for _ in range(40):
                    result = await sandbox.exec(["true"], timeout=20)
                    if result.ok:
                        return findings
                    await asyncio.sleep(1)
                raise CheckFailed(f"after the attack the sandbox runs no commands, but has not ended: {result}")
            except SandboxDied as error:
                if not may_die:
                    raise CheckFailed(f"the sandbox died of the attack: {error}") from error
                context.host.note = "it ended its sandbox"
                return []

    return attack


fork_bomb = overuse("fork_bomb", may_die=True, limit=_LIMITS.pids, most=_LIMITS.pids * 3, seconds=1.5)
one_process = overuse("memory", may_die=True, limit=_LIMITS.memory, size=_LIMITS.memory * 3 // 2, count=1, seconds=3.0)
several_processes = overuse(
    "memory", may_die=True, limit=_LIMITS.memory, size=_LIMITS.memory * 2 // 5, count=4, seconds=3.0
)
large_file = overuse("one_file", folder=".", limit=_LIMITS.file_size, most=_LIMITS.file_size * 2)
# Several file systems may each hold the limit, or less: more than three times the limit is no rounding.
many_files = overuse(
    "many_files",
    limit=_LIMITS.disk,
    most=_LIMITS.disk * 3,
    size=8 * _MIB,
    folders=[".", "/tmp", "/dev/shm", "/var/tmp", "/run", "/root"],
)


async def write_outside(context: CheckContext) -> list[str]:
    """Write to a file of the host, and beside it."""
    await context.host.run_program(await context.sandbox(), "write_file", {"file": "open"})
    return changes_outside(context)


async def signal_host(context: CheckContext) -> list[str]:
    """Kill a process of the host."""
    await context.host.run_program(await context.sandbox(), "signal_host", {})
    return ["a process of the host was killed"] if context.host.victim_died() else []


async def forge_messages(context: CheckContext) -> list[str]:
    """Forge the messages of the process that runs commands inside."""
    async with context.fresh() as sandbox:
        try:
            result = await context.host.start(sandbox, "forge", {"inside": context.capabilities.processes})
            next_result = await sandbox.exec("echo after; exit 3", timeout=20)
        except SandboxDied:
            context.host.note = "it ended its sandbox"  # and its forged messages were not believed
            return []
        except SandboxError as error:
            raise CheckFailed(f"the sandbox does not respond, but has not ended: {error}") from error
    findings = [] if result.exit_code in {7, 124, 137} else [f"the command's result was changed to {result}"]
    if (next_result.exit_code, next_result.stdout) != (3, b"after\n"):
        findings.append(f"the next command's result became {next_result}")
    return findings


async def starve_sibling(context: CheckContext) -> list[str]:
    """Use up what the kernel counts by user, and look for what another sandbox lacks then."""
    async with context.fresh() as sandbox, context.fresh() as sibling:
        if lacking := await context.host.run_program(sibling, "scarce", {}):
            raise CheckFailed(f"before the attack, another sandbox already lacks {lacking}")
        hoarding = asyncio.create_task(context.host.run_program(sandbox, "hoard", {"output": "held", "end": "end"}))
        try:
            if not await keeps_writing(sandbox, "held"):
                raise CheckFailed("the attack's process never ran")
            return await context.host.run_program(sibling, "scarce", {})
        finally:
            await sandbox.write_file("end", b"")
            await hoarding


async def outlive_timeout(context: CheckContext) -> list[str]:
    """Survive a timeout: double fork, new session, no environment, ignored signals."""
    sandbox = await context.sandbox()
    findings = []
    escapes = {
        "a double fork with an empty environment": '(env -i PATH=$PATH setsid sh -c "$LOOP" & ) & sleep 30',
        "a grandchild whose parent is killed": "(sh -c 'sh -c \"$LOOP\" & kill -9 $$' &); sleep 30",
        "a child that stops its parents": 'sh -c "$LOOP" & kill -STOP $PPID 2>/dev/null; sleep 30',
    }
    for escape, script in escapes.items():
        file = context.name()
        loop = f"trap '' TERM INT HUP QUIT; while :; do echo >> {file}; sleep 0.05; done"
        result = await sandbox.exec(script, timeout=1.0, env={"LOOP": loop})
        if not result.timed_out:
            raise CheckFailed(f"the attack's command ended before its time-out: {result}")
        if await lines_written(sandbox, file) == 0:
            raise CheckFailed(f"the attack's process never ran: {escape}")
        if not await stopped_writing(sandbox, file):
            findings.append(f"{escape} outlives the time-out")
    return findings


async def outlive_by_thread(context: CheckContext) -> list[str]:
    """Survive a time-out in a process whose first thread has ended: it looks like one that has ended."""
    sandbox, file = await context.scratch()
    result = await context.host.start(sandbox, "outlive", {"output": file, "end": "never"}, timeout=3.0)
    if not result.timed_out or await lines_written(sandbox, file) == 0:
        raise CheckFailed(f"the attack's process never ran: {result}")
    return [] if await stopped_writing(sandbox, file) else ["a thread outlives the time-out"]


async def outlive_host(context: CheckContext) -> list[str]:
    """Survive SIGKILL of the host process."""
    if context.config is None:
        raise CheckSkipped("the backend was given as an object: another process cannot open it")
    mark = f"{context.token}-{context.name()}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "turnwise.ext.checks.sandbox.killed_host",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # The other process must find a custom backend, too.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(pickle.dumps((context.config, context.spec, mark)))
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        if line != b"ready\n":
            raise CheckFailed(f"the host process did not start its sandbox: it wrote {line!r}")
        is_local = bool(host_processes(mark))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
    try:
        if not context.capabilities.survives_host:
            if not is_local:
                raise CheckFailed("the processes inside cannot be seen from here, so whether they ended is unknown")
            return [] if await processes_ended(mark) else ["a process outlives the host"]
        reaped = await context.backend.reap()
        if reaped < 1:
            return [f"the reaper found {reaped} sandboxes of the dead host"]
        return [] if await processes_ended(mark) else ["a process outlives the host and the reaper"]
    finally:
        for pid in host_processes(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
