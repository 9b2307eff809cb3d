"""Fixtures of the attacks on the host: a secret, files, a victim process and listening servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from turnwise.ext.checks.sandbox.report import CheckFailed, CheckSkipped
from turnwise.sandboxes.core import ExecResult, Sandbox

SECRET: Final = "TURNWISE_CHECK_SECRET"
"""A variable of the host's environment that must not be visible inside."""
UNTOUCHED: Final = "untouched"
"""The content of the host's file that every user may write."""
_PROGRAMS: Final = Path(__file__).parent / "programs.py"
_INSIDE: Final = ".turnwise-attacks"
_NO_PYTHON: Final = "there is no python3 inside: name an image with one, or mount one (spec.mounts and spec.env)"


@dataclass(slots=True)
class HostFixtures:
    """The fixtures of one run of the checker.

    Attributes:
        secret: Content that must not be readable inside.
        mark: Marker in the victim's command line, sent to servers by attackers.
        files: Host files: ``world`` (0644) and ``private`` (0600) hold the secret, ``open`` (0666) is world-writable,
            ``socket`` is a unix socket.
        note: How the running attack was contained, where that is noteworthy.
    """

    secret: str
    mark: str
    files: dict[str, Path]
    ports: dict[str, int]
    addresses: list[str]
    _process: subprocess.Popen[bytes]
    note: str = ""
    _received: dict[str, list[str]] = field(default_factory=dict)
    _prepared: set[str] = field(default_factory=set)

    def program_input(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the input of an attack's program: the fixtures' addresses, and its own options.

        A ``file`` among them names one of the host's files, whose ``path`` is added.
        """
        path = {"path": str(self.files[options["file"]])} if "file" in options else {}
        sockets = {"abstract": f"@{self.mark}", "path": str(self.files["socket"])}
        common = {"secret": self.secret, "mark": self.mark, "victim": self._process.pid, "addresses": self.addresses}
        return {**common, "ports": self.ports, "sockets": sockets, "folder": ".", **path, **options}

    def victim_died(self) -> bool:
        """Return whether the victim process is gone; a new one is started then."""
        try:
            # An accepted signal may take a moment on a busy machine.
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return False
        self._process = _start_victim(self.mark, self.secret)
        return True

    def end(self) -> None:
        """Kill the victim process."""
        self._process.kill()
        self._process.wait()

    async def received(self, kind: str) -> list[str]:
        """Return what a server received, after in-flight messages arrived."""
        # A message on the loopback arrives within a few turns of the event loop.
        for _ in range(20):
            if self._received.get(kind):
                break
            await asyncio.sleep(0.01)
        return self._received.pop(kind, [])

    async def start(self, sandbox: Sandbox, name: str, options: dict[str, Any], *, timeout: float = 40.0) -> ExecResult:
        """Run an attack's program inside; CheckSkipped if there is no Python."""
        if sandbox.id not in self._prepared:
            if not (await sandbox.exec(["python3", "-c", ""])).ok:
                raise CheckSkipped(_NO_PYTHON)
            await sandbox.write_file(f"{_INSIDE}/{_PROGRAMS.name}", _PROGRAMS.read_bytes())
            self._prepared.add(sandbox.id)
        # The input is not in the command line, which the attack may search for in /proc.
        command = ["python3", "-B", "-E", "-S", f"{_INSIDE}/{_PROGRAMS.name}", name]
        return await sandbox.exec(command, timeout=timeout, stdin=json.dumps(self.program_input(options)).encode())

    async def run_program(
        self, sandbox: Sandbox, name: str, options: dict[str, Any], *, may_die: bool = False
    ) -> list[str]:
        """Run an attack's program with an input and return its findings, none if it died and ``may_die``.

        Raises CheckFailed (undecided), CheckSkipped (no Python inside) or SandboxDied.
        """
        result = await self.start(sandbox, name, options)
        lines = result.stdout.decode("utf-8", "replace").splitlines()
        if lines[:1] != ["begun"]:
            raise CheckFailed(f"the attack did not start: {result}")
        if len(lines) > 1 and result.ok:
            findings: list[str] = json.loads(lines[-1])["findings"]
            return findings
        killed = result.exit_code > 128 or b"MemoryError" in result.stderr
        if may_die and killed and not result.timed_out:
            self.note = f"it was killed ({result.exit_code})"
            return []
        raise CheckFailed(f"the attack did not finish: {result}")


@contextlib.asynccontextmanager
async def host_fixtures(token: str) -> AsyncIterator[HostFixtures]:
    """Create the fixtures and remove them at the end."""
    secret, mark = os.environ[SECRET], f"{token}-victim"
    folder = _shared_folder()
    process = _start_victim(mark, secret)
    received: dict[str, list[str]] = {}

    async def listen(kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if mark.encode() in await reader.readline():
            received.setdefault(kind, []).append(f"a connection of the attacker ({kind})")
        writer.close()

    tcp = await asyncio.start_server(lambda r, w: listen("tcp", r, w), "0.0.0.0", 0)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{mark}")
    unix = [
        await asyncio.start_unix_server(lambda r, w: listen("unix", r, w), sock=abstract),
        await asyncio.start_unix_server(lambda r, w: listen("unix", r, w), folder / "socket"),
    ]
    (folder / "socket").chmod(0o666)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Datagrams(mark, received), local_addr=("0.0.0.0", 0)
    )
    files = {name: folder / name for name in ("world", "private", "open", "socket")}
    for name, mode in (("world", 0o644), ("private", 0o600), ("open", 0o666)):
        files[name].write_text(secret if name != "open" else UNTOUCHED)
        files[name].chmod(mode)
    ports = {"tcp": tcp.sockets[0].getsockname()[1], "udp": transport.get_extra_info("sockname")[1]}
    host = HostFixtures(secret, mark, files, ports, _addresses(), process, _received=received)
    try:
        yield host
    finally:
        host.end()
        transport.close()
        for server in (tcp, *unix):
            server.close()
        shutil.rmtree(folder, ignore_errors=True)


def _start_victim(mark: str, secret: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(900)", mark]
    return subprocess.Popen(command, env={SECRET: secret}, stdin=subprocess.DEVNULL)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, mark: str, received: dict[str, list[str]]) -> None:
        self._mark, self._received = mark, received

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        del addr
        if self._mark.encode() in data:
            self._received.setdefault("udp", []).append("a datagram of the attacker")


def _shared_folder() -> Path:
    """Create a folder that all users of this machine can enter, if possible."""
    bases = [Path(name) for name in ("/var/tmp", "/tmp") if os.access(name, os.W_OK)]
    shared = (base for base in bases if all(folder.stat().st_mode & 1 for folder in (base, *base.parents)))
    folder = Path(tempfile.mkdtemp(prefix="turnwise-check-", dir=next(shared, None)))
    folder.chmod(0o777)
    return folder


def _addresses() -> list[str]:
    """Return this machine's non-loopback addresses; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [probe.getsockname()[0]]
