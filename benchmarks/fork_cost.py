"""What a fork of a running episode costs: in the process, and with a sandbox whose workspace has 2,000 files.

``ms_in_process`` is the worst median of ``fork_env(env)`` over ToolEnvs of the library that keep their state in
attributes, each with an episode of four turns behind it. ``ms_local`` is the median of a fork of a ToolEnv with a local
sandbox in which a file was written since the last fork (``ms_local_fastest_tenth``: the tenth percentile, which other
work on the machine disturbs least), ``s_local_32`` the wall seconds of 32 forks of one parent at
the same time. Bars: 0.2 ms, 20 ms, 0.5 s.

A fork of a local sandbox starts when it is first used: ``ms_first_use`` is the median of the first command in a fork,
``s_first_use_32`` the wall seconds of 32 forks and a first command in each, at the same time. ``cpu_ms`` is the CPU
time of all processes for a fork, and for a fork with its first command and its end.

``ratio_docker`` is a fork of a docker sandbox (files in the container's layer, the same workspace) over ``commit`` and
``run`` by the engine's SDK, medians of forks made in turn; left out where no engine answers and none can be started.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import docker
from sandbox import repository

from harness.docker_engine import engine
from harness.measure import machine, parse, parser, report
from turnwise.envs import Env, ToolEnv, close_env, fork_env, make, register, reset_env, step_env
from turnwise.sandboxes import SandboxConfig, SandboxManager, SandboxSpec
from turnwise.sandboxes.archives import pack
from turnwise.tasks import Task
from turnwise.tasks.reader import load_tasks
from turnwise.tools import function_tool
from turnwise.tools.sample_arguments import example_arguments
from turnwise.types import Message, ToolCall

IN_PROCESS = ("calculator", "guess_number", "lookup", "trail")
TRAIL = Path(__file__).parents[1] / "examples" / "long_task" / "trail_env.py"
BARS = {"ms_in_process": 0.2, "ms_local": 20, "s_local_32": 0.5}
AT_ONCE = 32


class Workspace(ToolEnv):
    """A sandbox with a repository in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        await self.open_sandbox(SandboxSpec(workspace=self.folder))
        return "Work.", {}

    @function_tool
    async def change(self, module: int) -> str:
        """Change a file."""
        assert self.sandbox is not None
        await self.sandbox.write_file(f"package0/module{module}.py", b"changed")
        return "changed"


async def played(name: str) -> Env:
    """Return an environment whose episode has had four turns."""
    env = make(name)
    task = None if env.default_tasks is None else load_tasks(env.default_tasks, limit=1)[0]
    await reset_env(env, task, seed=0)
    for turn in range(4):
        calls = [
            ToolCall(f"{turn}_{tool.name}", tool.name, example_arguments(tool.schema) or {})
            for tool in env.toolset().values()
        ]
        if env._running:
            action: Message = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
            await step_env(env, action)
    return env


async def forked(env: Env, count: int) -> list[float]:
    """Fork an environment one time after the other; return the seconds of each."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        fork = await fork_env(env)
        taken.append(time.perf_counter() - began)
        await close_env(fork)
    return taken


async def in_process(repeats: int) -> dict[str, float]:
    """Return the median milliseconds of a fork by environment."""
    register("trail", f"{TRAIL}:TrailEnv")
    found = {}
    for name in IN_PROCESS:
        env = await played(name)
        found[name] = 1e3 * statistics.median(await forked(env, 40 * repeats))
        await close_env(env)
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of its children and of what those have waited for."""
    own = os.times()
    total = own.user + own.system
    for child in Path("/proc/self/task").glob("*/children"):
        for pid in child.read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(each) for each in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


async def used(env: Env) -> None:
    """Run a first command in an environment's sandbox."""
    assert env.sandbox is not None
    assert (await env.sandbox.exec(["true"], timeout=120)).ok


async def one_by_one(env: Env, count: int, *, use: bool) -> dict[str, float]:
    """Return what forks cost one after the other, each after a change of a file."""
    taken, first = [], []
    spent = 0.0
    for number in range(count):
        await env.sandbox.write_file("package0/module0.py", b"%d" % number)  # type: ignore[union-attr]
        cpu, began = cpu_seconds(), time.perf_counter()
        fork = await fork_env(env)
        made = time.perf_counter()
        if use:
            await used(fork)
        taken.append(made - began)
        first.append(time.perf_counter() - made)
        await close_env(fork)
        spent += cpu_seconds() - cpu
    return {
        "ms": 1e3 * statistics.median(taken),
        "ms_fastest_tenth": 1e3 * statistics.quantiles(taken, n=10)[0],
        "ms_first_use": 1e3 * statistics.median(first),
        "cpu_ms": 1e3 * spent / count,
    }


async def at_once(env: Env, number: int, *, use: bool) -> float:
    """Return the wall seconds of forks of one parent at the same time, after a change of a file."""
    await env.sandbox.write_file("package0/module0.py", b"%d" % number)  # type: ignore[union-attr]
    began = time.perf_counter()
    forks = await asyncio.gather(*(fork_env(env) for _ in range(AT_ONCE)))
    if use:
        await asyncio.gather(*map(used, forks))
    taken = time.perf_counter() - began
    await asyncio.gather(*(close_env(each) for each in forks))
    return taken


async def with_sandboxes(folder: Path, repeats: int) -> dict[str, Any]:
    """Return the figures of forks of a ToolEnv with a sandbox."""
    manager = SandboxManager(SandboxConfig())
    env = Workspace(folder)
    env.sandboxes = manager
    try:
        await reset_env(env, None, seed=0)
        forks = await one_by_one(env, 8 * repeats, use=False)
        uses = await one_by_one(env, 4 * repeats, use=True)
        together = [await at_once(env, number, use=False) for number in range(repeats)]
        used_together = [await at_once(env, number, use=True) for number in range(max(1, repeats // 2))]
        await close_env(env)
    finally:
        await manager.close()
    return {
        "ms_local": round(forks["ms"], 1),
        "ms_local_fastest_tenth": round(forks["ms_fastest_tenth"], 1),
        "s_local_32": round(statistics.median(together), 3),
        "ms_first_use": round(uses["ms_first_use"], 1),
        "s_first_use_32": round(statistics.median(used_together), 3),
        "cpu_ms": {"fork": round(forks["cpu_ms"], 1), "fork_and_use": round(uses["cpu_ms"], 1)},
    }


async def with_docker(host: str, image: str, folder: Path, repeats: int) -> dict[str, float]:
    """Return the milliseconds of a fork of a container, and of ``commit`` and ``run`` by the SDK, made in turn."""
    client = docker.DockerClient(base_url=host)
    config = {"url": host, "image": image, "pull": "never", "files": "layer"}
    manager = SandboxManager(SandboxConfig(name="docker", config=config))
    theirs = client.containers.run(image, ["sleep", "600"], detach=True, init=True, network_mode="none")
    taken: dict[str, list[float]] = {"ours": [], "raw": []}
    try:
        with tempfile.TemporaryFile() as packed:
            pack(folder, packed)
            packed.seek(0)
            theirs.put_archive("/tmp", packed)
        sandbox = await manager.open(SandboxSpec(workspace=folder))
        for turn in range(repeats):
            for side in ("ours", "raw") if turn % 2 == 0 else ("raw", "ours"):
                began = time.perf_counter()
                if side == "ours":
                    [fork] = await manager.fork(sandbox)
                else:
                    base = theirs.commit()
                    raw = client.containers.run(base.id, ["sleep", "600"], detach=True, init=True, network_mode="none")
                taken[side].append(1e3 * (time.perf_counter() - began))
                if side == "ours":
                    await manager.release(fork)
                else:
                    raw.remove(force=True)
                    client.images.remove(base.id)
    finally:
        theirs.remove(force=True)
        await manager.close()
        client.close()
    return {side: statistics.median(each) for side, each in taken.items()}


def docker_figures(folder: Path, repeats: int) -> dict[str, Any]:
    """Return the figures of docker, or none where there is no engine."""
    with engine() as found:
        if found is None:
            print("docker is left out: no engine answers, and none was started", file=sys.stderr)
            return {}
        taken = asyncio.run(with_docker(*found, folder, repeats))
    return {
        "ratio_docker": round(taken["ours"] / taken["raw"], 2),
        "ms_docker": {side: round(each, 1) for side, each in taken.items()},
    }


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=5, quick_repeats=2))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "repository"
        folder.mkdir()
        repository(folder)
        plain = asyncio.run(in_process(arguments.repeats))
        local = asyncio.run(with_sandboxes(folder, arguments.repeats))
        local |= docker_figures(folder, arguments.repeats)
    report(
        {
            "ms_in_process": round(max(plain.values()), 3),
            **local,
            "bars": BARS,
            "in_process": {name: round(each, 3) for name, each in plain.items()},
            "config": {"at_once": AT_ONCE, "files": 2000, "backend": "local"},
            "machine": machine("turnwise-rl", "docker"),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
