"""Sandbox backends with one fault each, over real local sandboxes without isolation; and one of forks."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.errors import SandboxError
from turnwise.sandboxes import Capabilities, ExecResult, Sandbox, SandboxBackend, SandboxProcess, SandboxSpec
from turnwise.sandboxes.local import LocalBackend

# Before 3.11.4 tarfile had no filters and trusted archives.
_TRUSTING: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}


async def _believe_command(inner: Sandbox, command: Any, options: dict[str, Any]) -> ExecResult:
    """Give the command the channel of its own exit code, and believe its first message."""
    argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
    result = await inner.exec(["sh", "-c", 'rm -f .told; "$@" 3>>.told', "sh", *argv], **options)
    try:
        message = await inner.read_file(".told")
        return replace(result, exit_code=json.loads(message[: message.index(b"}") + 1])["exit"])
    except (SandboxError, ValueError):
        return result


async def _leave_running(inner: Sandbox, command: Any, options: dict[str, Any]) -> ExecResult:
    """Report a time-out, and leave the command running."""
    argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
    seconds = options.get("timeout") or 30
    if seconds >= 5:
        return await inner.exec(command, **options)
    script = f'"$@" </dev/null >/dev/null 2>&1 & sleep {seconds}'
    await inner.exec(["sh", "-c", script, "sh", *argv], **{**options, "timeout": seconds + 20})
    return ExecResult(124, timed_out=True)


async def _run_outside(inner: Sandbox, command: Any, options: dict[str, Any]) -> ExecResult:
    """Run background loops as host processes that are never ended."""
    if not (isinstance(command, str) and "while :" in command):
        return await inner.exec(command, **options)
    home = (await inner.exec("pwd -P")).stdout.decode().strip()
    subprocess.Popen(["sh", "-c", command], cwd=home, start_new_session=True)  # noqa: ASYNC220
    return ExecResult(0)


_RUNS = {"believes commands": _believe_command, "leaves commands": _leave_running, "runs outside": _run_outside}


class FaultySandbox(Sandbox):
    """A real sandbox with one fault, by name."""

    backend = "faulty"

    def __init__(self, inner: Sandbox, fault: str) -> None:
        self.inner, self.fault, self.spec, self.id = inner, fault, inner.spec, inner.id

    async def start(self) -> None:
        await self.inner.start()
        self.capabilities = self.inner.capabilities

    async def close(self) -> None:
        await self.inner.close()

    async def exec(self, command: Any, **options: Any) -> ExecResult:
        fault, inner = self.fault, self.inner
        if fault in _RUNS:
            return await _RUNS[fault](inner, command, options)
        if fault == "raises KeyError":
            raise KeyError("exit")
        if fault == "cuts nothing":
            options["max_output"] = 2**24
        if fault == "leaks the environment":
            options["env"] = {**os.environ, **(options.get("env") or {})}
        result = await inner.exec(command, **options)
        if fault == "a time-out raises" and result.timed_out:
            raise SandboxError("too slow")
        if fault == "merges streams":
            return replace(result, stdout=result.stdout + result.stderr, stderr=b"")
        return result

    async def spawn(self, command: Any, **options: Any) -> SandboxProcess:
        return await self.inner.spawn(command, **options)

    async def read_file(self, path: str, **options: Any) -> bytes:
        return await self.inner.read_file(path, **(options if self.fault != "reads all" else {}))

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        await self.inner.write_file(path, data, mode=None if self.fault == "forgets modes" else mode)

    async def upload(self, source: Path, target: str) -> None:
        await self.inner.upload(source, target)

    async def download(self, source: str, target: Path, **options: Any) -> None:
        if self.fault not in {"trusts archives", "follows links"}:
            await self.inner.download(source, target, **options)
            return
        mode = "-c" if self.fault == "trusts archives" else "-ch"
        packed = await self.inner.exec(["tar", "-C", source, mode, "."], max_output=2**24)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(target, **_TRUSTING)

    async def snapshot(self) -> str:
        return await self.inner.snapshot()

    async def fork(self, count: int = 1) -> Sequence[Sandbox]:
        return await self.inner.fork(count)


class FaultyBackend(SandboxBackend):
    """Sandboxes of the level ``plain`` with a fault.

    Args:
        fault: Name of the fault; empty for none.
        lies: Capabilities that are claimed falsely.
    """

    name = "faulty"

    def __init__(self, fault: str = "", lies: dict[str, bool] | None = None) -> None:
        self.inner = LocalBackend(isolation="plain", unsafe=True)
        self.fault, self.lies = fault, lies or {}

    async def probe(self) -> Capabilities:
        return replace(await self.inner.probe(), **self.lies)  # type: ignore[arg-type]

    def make(self, spec: SandboxSpec) -> Sandbox:
        if self.fault == "forgets file_size":
            spec = replace(spec, limits=replace(spec.limits, file_size=2**40))
        return FaultySandbox(self.inner.make(spec), self.fault)

    async def drop_snapshot(self, snapshot: str) -> None:
        await self.inner.drop_snapshot(snapshot)

    async def reap(self) -> int:
        return await self.inner.reap()

    async def close(self) -> None:
        await self.inner.close()


class ForkedSandbox(FaultySandbox):
    """A fork of a sandbox that has been closed."""

    async def start(self) -> None:
        origin = self.inner
        async with origin:
            [self.inner] = await origin.fork()
        self.id, self.capabilities = self.inner.id, self.inner.capabilities

    async def listen(self, port: int = 0) -> socket.socket:
        return await self.inner.listen(port)


class ForkedBackend(LocalBackend):
    """Local sandboxes, each a fork of another."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        return ForkedSandbox(super().make(spec), "")
