"""Attacks that try to live on: past the time-out of their command, and past the death of the host process.

Owns: one function an attack; each returns what it got. Refuses: what lives on by right (``persistence.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict

from turnwise.sandboxes.checker.exam import CheckFailed, CheckSkipped, beats, gone, host_processes, quiet
from turnwise.sandboxes.checker.scene import Scene


async def time_out(scene: Scene) -> list[str]:
    """Fork twice, make a new session, drop the environment, be deaf to signals, and go on after the time-out."""
    sandbox = await scene.exam.sandbox()
    got = []
    ways = {
        "a double fork with an empty environment": '(env -i PATH=$PATH setsid sh -c "$LOOP" & ) & sleep 30',
        "a child of a child whose parent is killed": "(sh -c 'sh -c \"$LOOP\" & kill -9 $$' &); sleep 30",
        "one that stops its parents": 'sh -c "$LOOP" & kill -STOP $PPID 2>/dev/null; sleep 30',
    }
    for way, script in ways.items():
        file = scene.exam.name()
        loop = f"trap '' TERM INT HUP QUIT; while :; do echo >> {file}; sleep 0.05; done"
        result = await sandbox.exec(script, timeout=1.0, env={"LOOP": loop})
        if not result.timed_out:
            raise CheckFailed(f"the attack's command ended before its time-out: {result}")
        if await beats(sandbox, file) == 0:
            raise CheckFailed(f"the attack's process never ran: {way}")
        if not await quiet(sandbox, file):
            got.append(f"{way} outlives the time-out")
    return got


async def host(scene: Scene) -> list[str]:
    """Go on after SIGKILL of the host process that had started the sandbox."""
    exam = scene.exam
    if exam.config is None:
        raise CheckSkipped("the backend was given as an object: another process cannot open it")
    mark = f"{exam.token}-{exam.name()}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "turnwise.sandboxes.checker.hostage",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # A backend of one's own is found there as it is found here.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    given = {"config": exam.config.model_dump(mode="json"), "spec": asdict(exam.spec), "mark": mark}
    try:
        process.stdin.write(json.dumps(given, default=str).encode() + b"\n")
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        if line != b"ready\n":
            raise CheckFailed(f"the host process did not start its sandbox: it wrote {line!r}")
        local = bool(host_processes(mark))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
    try:
        if not exam.capabilities.survives_host:
            if not local:
                raise CheckFailed("the processes inside cannot be seen from here, so nobody knows whether they ended")
            return [] if await gone(mark) else ["a process outlives the host"]
        reaped = await exam.backend.reap()
        if reaped < 1:
            return [f"the reaper found {reaped} sandboxes of the dead host"]
        return [] if await gone(mark) else ["a process outlives the host and the reaper"]
    finally:
        for pid in host_processes(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
