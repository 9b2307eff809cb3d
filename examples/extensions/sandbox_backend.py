"""A sandbox backend that writes a line for every command: another backend, with a log of what ran in it.

    turnwise check-sandbox examples/extensions/sandbox_backend.py:LoggedBackend log=commands.jsonl

In a configuration: ``rollout.sandbox.name=examples/extensions/sandbox_backend.py:LoggedBackend``, and
``rollout.sandbox.config.log=commands.jsonl``.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from turnwise.sandboxes import (
    Capabilities,
    ExecResult,
    Sandbox,
    SandboxBackend,
    SandboxProcess,
    SandboxSpec,
    register_backend,
)
from turnwise.sandboxes.core import MAX_FILE, MAX_OUTPUT, Command
from turnwise.sandboxes.local import LocalBackend


class LoggedSandbox(Sandbox):
    """A sandbox whose commands are logged; everything is done by the one inside."""

    backend: ClassVar[str] = "logged"

    def __init__(self, inner: Sandbox, log: Path) -> None:
        self.inner, self.spec, self.id, self._log = inner, inner.spec, inner.id, log

    async def start(self) -> None:
        """Start the sandbox inside."""
        await self.inner.start()
        self.capabilities = self.inner.capabilities

    async def close(self) -> None:
        """Close the sandbox inside."""
        await self.inner.close()

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """Run a command, and log how it ended."""
        result = await self.inner.exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, max_output=max_output)
        self._note(command, exit_code=result.exit_code, timed_out=result.timed_out, seconds=round(result.duration, 3))
        return result

    async def spawn(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> SandboxProcess:
        """Start a command, and log that it did."""
        process = await self.inner.spawn(command, cwd=cwd, env=env)
        self._note(command, spawned=True)
        return process

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Read a file inside."""
        return await self.inner.read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file inside."""
        await self.inner.write_file(path, data, mode=mode)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder in."""
        await self.inner.upload(source, target)

    async def download(self, source: str, target: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Copy a file or folder out."""
        await self.inner.download(source, target, max_bytes=max_bytes)

    async def snapshot(self) -> str:
        """Keep the files as they are."""
        return await self.inner.snapshot()

    async def fork(self, count: int = 1) -> Sequence[Sandbox]:
        """Return forks, which are logged, too."""
        forks = [LoggedSandbox(fork, self._log) for fork in await self.inner.fork(count)]
        for fork in forks:
            fork.capabilities = fork.inner.capabilities
        return forks

    async def listen(self, port: int = 0) -> socket.socket:
        """Return a socket that listens inside."""
        return await self.inner.listen(port)

    async def expose(self, host: str, port: int) -> str:
        """Make an address of the host reachable from inside."""
        return await self.inner.expose(host, port)

    def _note(self, command: Command, **facts: Any) -> None:
        words = command if isinstance(command, str) else list(command)
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"sandbox": self.id, "command": words, **facts}) + "\n")


@register_backend("logged")
class LoggedBackend(SandboxBackend):
    """The local backend with a log.

    Args:
        log: File of JSON lines, appended.
        **local: Arguments of the local backend.
    """

    name: ClassVar[str] = "logged"

    def __init__(self, *, log: str, **local: Any) -> None:
        self._log = Path(log).expanduser().absolute()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._inner = LocalBackend(**local)

    async def probe(self) -> Capabilities:
        """Return what the local backend isolates here."""
        return await self._inner.probe()

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox with a log."""
        return LoggedSandbox(self._inner.make(spec), self._log)

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot."""
        await self._inner.drop_snapshot(snapshot)

    async def reap(self) -> int:
        """Remove what dead hosts left."""
        return await self._inner.reap()

    async def close(self) -> None:
        """Free what the local backend holds."""
        await self._inner.close()
