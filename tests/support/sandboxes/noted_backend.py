"""A sandbox backend that runs nothing and notes each call, for tests of the manager."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnwise.errors import SandboxStartError
from turnwise.sandboxes import Capabilities, ExecResult, Sandbox, SandboxBackend, SandboxProcess, SandboxSpec


class NotedSandbox(Sandbox):
    backend = "noted"

    def __init__(self, owner: NotedBackend, spec: SandboxSpec, number: int) -> None:
        self.owner, self.spec, self.id, self.number = owner, spec, f"noted-{number}", number
        self.capabilities = owner.holds

    async def start(self) -> None:
        self.owner.starting += 1
        self.owner.most_starting = max(self.owner.most_starting, self.owner.starting)
        try:
            if self.owner.gate is not None:
                await self.owner.gate.wait()
            if self.number in self.owner.failing:
                raise self.owner.error
            self.owner.alive.add(self.id)
            self.owner.started.set()
        finally:
            self.owner.starting -= 1

    async def close(self) -> None:
        self.owner.alive.discard(self.id)

    async def fork(self, count: int = 1) -> list[Sandbox]:
        forks = [self.owner.make(self.spec) for _ in range(count)]
        for fork in forks:
            await fork.start()
        return forks

    async def exec(self, command: Any, **_: Any) -> ExecResult:
        raise NotImplementedError

    async def spawn(self, command: Any, **_: Any) -> SandboxProcess:
        raise NotImplementedError

    async def read_file(self, path: str, *, max_bytes: int = 0) -> bytes:
        raise NotImplementedError

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        raise NotImplementedError

    async def upload(self, source: Path, target: str) -> None:
        raise NotImplementedError

    async def download(self, source: str, target: Path, *, max_bytes: int = 0) -> None:
        raise NotImplementedError

    async def snapshot(self) -> str:
        raise NotImplementedError

    async def expose(self, host: str, port: int) -> str:
        raise NotImplementedError


class NotedBackend(SandboxBackend):
    """Sandboxes are numbered in the order in which they are made; those in ``failing`` do not start."""

    name = "noted"
    holds = Capabilities("noted")

    def __init__(self, failing: set[int] | None = None) -> None:
        self.failing = failing or set()
        self.error: Exception = SandboxStartError("it did not start")
        self.gate: asyncio.Event | None = None
        self.started = asyncio.Event()
        self.alive: set[str] = set()
        self.made = self.starting = self.most_starting = self.reaped = 0
        self.closed = False

    async def probe(self) -> Capabilities:
        return self.holds

    def make(self, spec: SandboxSpec) -> Sandbox:
        self.made += 1
        return NotedSandbox(self, spec, self.made)

    async def drop_snapshot(self, snapshot: str) -> None:
        raise NotImplementedError

    async def reap(self) -> int:
        self.reaped += 1
        return 0

    async def close(self) -> None:
        self.closed = True


async def until(holds: Callable[[], bool], what: str) -> None:
    """Let other tasks of the loop run until something holds."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"never: {what}")
