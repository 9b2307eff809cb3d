"""Our sandboxes of this machine: ``exec`` in each, and workspaces of a repository of 2,000 files.

A start is :meth:`Sandbox.start`; ``first_exec_ms`` is until a first command has ended in it, so that a start that is
put off shows. ``workspace_ms`` is what a start takes longer with the repository in its workdir than without, in turn,
until a command has read a file of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from timing import BOXES, COMMANDS, check, milliseconds, p50, sizes

from turnwise.sandboxes import Sandbox, SandboxConfig, SandboxManager, SandboxSpec
from turnwise.sandboxes.local import LocalBackend

FILES = 2000
READ = ("cat", "package0/module0.py")


async def run(box: Sandbox, command: str) -> None:
    done = await box.exec(COMMANDS[command][0])
    check(command, done.exit_code, done.text)


async def starts(manager: SandboxManager, spec: SandboxSpec, count: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds until each start is done, and until a first command has ended."""
    ready, ended = [], []
    for _ in range(count):
        began = time.perf_counter()
        box = await manager.open(spec)
        ready.append(milliseconds(began))
        await run(box, "true")
        ended.append(milliseconds(began))
        await manager.release(box)
    return ready, ended


async def together(boxes: Sequence[Sandbox], command: str) -> float:
    """Return how many commands a second end, one at a time in each sandbox."""
    counts = [0] * len(boxes)
    began = time.perf_counter()

    async def work(at: int) -> None:
        while time.perf_counter() - began < sizes().seconds:
            await run(boxes[at], command)
            counts[at] += 1

    await asyncio.gather(*(work(at) for at in range(len(boxes))))
    return sum(counts) / (milliseconds(began) / 1000)


async def commands(manager: SandboxManager, spec: SandboxSpec, found: dict[str, float]) -> None:
    """Measure commands in one sandbox, and in many at the same time."""
    boxes = await asyncio.gather(*(manager.open(spec) for _ in range(BOXES)))
    for command in COMMANDS:
        times = []
        for _ in range(sizes().execs):
            began = time.perf_counter()
            await run(boxes[0], command)
            times.append(milliseconds(began))
        found[f"exec_p50_ms {command}"] = p50(times)
        found[f"execs_per_s_{BOXES} {command}"] = await together(boxes, command)
    await asyncio.gather(*(manager.release(box) for box in boxes))


async def workspaces(manager: SandboxManager, repository: Path, found: dict[str, float]) -> None:
    """Measure starts with a repository and without, in turn."""
    wanted = (repository / READ[1]).read_bytes()
    counted = f"find . -type f | wc -l && {' '.join(READ)} | wc -c"
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * sizes().starts):
        full = turn % 2 == 0
        spec = SandboxSpec(workspace=repository) if full else SandboxSpec()
        began = time.perf_counter()
        box = await manager.open(spec)
        done = await box.exec(READ if full else ("true",))
        times[full].append(milliseconds(began))
        assert not full or done.stdout == wanted
        if turn == 0:
            assert (await box.exec(counted)).text.split() == [str(FILES), str(len(wanted))]
        await manager.release(box)
    found["workspace_ms"] = p50(times[True]) - p50(times[False])


def without_overlay(manager: SandboxManager) -> None:
    """Have workspaces copied, as on a machine that allows no overlay."""
    backend = manager.backend
    assert isinstance(backend, LocalBackend)
    backend.level = replace(backend.level, overlay=False)


async def main() -> None:
    config, repository = SandboxConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])
    parts = sys.argv[3].split(",")
    found: dict[str, float] = {}
    manager = SandboxManager(config)
    spec = SandboxSpec()
    try:
        capabilities = await manager.probe()
        if "copies" in parts:
            without_overlay(manager)
        if "start" in parts:
            ready, ended = await starts(manager, spec, sizes().starts)
            found["start_ms"], found["first_exec_ms"] = p50(ready), p50(ended)
        if "exec" in parts:
            await commands(manager, spec, found)
        if "workspace" in parts:
            await workspaces(manager, repository, found)
    finally:
        await manager.close()
    print(json.dumps({**found, "isolation": capabilities.isolation, "notes": list(capabilities.notes)}))


if __name__ == "__main__":
    asyncio.run(main())
