"""Our containers and the raw SDK's on one engine: a command in the one, then in the other, in turn.

The raw side is a container that sleeps, and ``exec_run`` of a shell in it. What an engine takes drifts by more than
what the two differ in, so that only commands which follow one another can be compared: ``docker_over_sdk`` is the
median of ours over the median of theirs, over pairs of which every second one is turned round.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import docker
from timing import BOXES, COMMANDS, check, milliseconds, p50
from turnwise_side import run, together

from turnwise.sandboxes import Sandbox, SandboxConfig, SandboxManager, SandboxSpec


def raw(box: docker.models.containers.Container, command: str) -> None:
    """Run a command by the SDK."""
    done = box.exec_run(["sh", "-c", COMMANDS[command][0]])
    check(command, done.exit_code, done.output.decode())


async def pairs(
    ours: Sandbox, theirs: docker.models.containers.Container, command: str, count: int
) -> tuple[list[float], list[float]]:
    """Return what a command took on each side. While the SDK waits, nothing of ours runs."""
    mine, raws = [], []
    for turn in range(count):
        for side in ("ours", "raw") if turn % 2 == 0 else ("raw", "ours"):
            began = time.perf_counter()
            if side == "ours":
                await run(ours, command)
                mine.append(milliseconds(began))
            else:
                raw(theirs, command)
                raws.append(milliseconds(began))
    return mine, raws


async def started(manager: SandboxManager, count: int, found: dict[str, float]) -> list[Sandbox]:
    """Start some one after the other, then all others together."""
    boxes, ready, ended = [], [], []
    for _ in range(count):
        began = time.perf_counter()
        boxes.append(await manager.open(SandboxSpec()))
        ready.append(milliseconds(began))
        await run(boxes[-1], "true")
        ended.append(milliseconds(began))
    found["start_ms"], found["first_exec_ms"] = p50(ready), p50(ended)
    return [*boxes, *await asyncio.gather(*(manager.open(SandboxSpec()) for _ in range(BOXES - count)))]


async def main() -> None:
    image, quick = sys.argv[1], "--quick" in sys.argv
    manager = SandboxManager(SandboxConfig.model_validate({"name": "docker", "config": {"image": image}}))
    client = docker.from_env()
    found: dict[str, float] = {}
    began = time.perf_counter()
    theirs = client.containers.run(image, ["sleep", "600"], detach=True, init=True, network_mode="none")
    found["sdk start_ms"] = milliseconds(began)
    try:
        capabilities = await manager.probe()
        ours = await manager.open(SandboxSpec())
        for command, count in {"true": 30 if quick else 60, "ls": 8 if quick else 20}.items():
            mine, raws = await pairs(ours, theirs, command, count)
            found[f"exec_p50_ms {command}"], found[f"sdk exec_p50_ms {command}"] = p50(mine), p50(raws)
        found["docker_over_sdk"] = found["exec_p50_ms true"] / found["sdk exec_p50_ms true"]
        boxes = await started(manager, 3 if quick else 6, found)
        for command in ("true",) if quick else COMMANDS:
            found[f"execs_per_s_{BOXES} {command}"] = await together(boxes, command)
    finally:
        theirs.remove(force=True)
        await manager.close()
    print(json.dumps({**found, "isolation": capabilities.isolation, "notes": list(capabilities.notes)}))


if __name__ == "__main__":
    asyncio.run(main())
