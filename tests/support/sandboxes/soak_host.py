"""One host process of the soak test, which opens many sandboxes at a time and ends them in different ways.

Run as ``python soak_host.py FOLDER MARK SEED COUNT TOGETHER ENGINE``, the last empty for local ones; prints a line
for each that has ended, in what way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path

import docker

from support.sandboxes.docker_engine import SMALL
from turnwise.errors import SandboxDied, SandboxError
from turnwise.sandboxes.core import SandboxBackend, SandboxLimits, SandboxSpec
from turnwise.sandboxes.docker import DockerBackend
from turnwise.sandboxes.local import LocalBackend

WAYS = ("closed", "forgotten", "killed", "emptied", "forked")


def first_processes(launcher: int) -> list[int]:
    """The processes that a launcher started and that still run."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == launcher and fields[0] != b"Z":
                pids.append(int(name))
    return pids


def launchers() -> list[int]:
    return first_processes(os.getpid())


def kill_any(engine: str) -> None:
    """Kill one of the sandboxes that run."""
    if not engine:
        victims = first_processes(launchers()[0])
        if victims:
            os.kill(random.choice(victims), signal.SIGKILL)
        return
    client = docker.APIClient(base_url=engine, version="auto", timeout=120)
    with contextlib.closing(client), contextlib.suppress(docker.errors.APIError):
        victims = client.containers(filters={"label": "turnwise.owner"})
        if victims:
            client.remove_container(random.choice(victims)["Id"], force=True)


async def one(backend: SandboxBackend, ending: str, workspace: Path, mark: str, engine: str) -> None:
    spec = SandboxSpec(workspace=workspace, limits=SandboxLimits(memory=256 * 2**20, disk=64 * 2**20))
    sandbox = backend.make(spec)
    try:
        await sandbox.start()
        result = await sandbox.exec(f"(setsid sleep 1000.{mark} &); echo x > made; echo $$", timeout=120)
        assert result.ok, result
        if ending == "killed":
            await asyncio.to_thread(kill_any, engine)
        elif ending == "emptied":
            await sandbox.exec("kill -9 -1", timeout=120)
        elif ending == "forked":
            await (await sandbox.fork())[0].close()
    except SandboxDied:
        ending = "killed by another"  # the victim of one that kills is any of them
    if ending != "forgotten":
        await sandbox.close()
    print(ending, flush=True)


async def main() -> None:
    folder, mark, seed, count, together = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
    engine = sys.argv[6]
    random.seed(seed)
    workspace = folder / "workspace"
    backend: SandboxBackend = (
        DockerBackend(url=engine, image=SMALL, pull="never")
        if engine
        else LocalBackend("bubblewrap", directory=folder / "state")
    )
    gate = asyncio.Semaphore(together)

    async def gated(ending: str) -> None:
        async with gate:
            try:
                await one(backend, ending, workspace, mark, engine)
            except SandboxError as error:
                print(f"failed: {error}", flush=True)

    await asyncio.gather(*(gated(random.choice(WAYS)) for _ in range(count)))
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
