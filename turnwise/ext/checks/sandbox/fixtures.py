"""Host-side fixtures of the attacks: secrets, files, a victim process and listening servers."""

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

from turnwise.ext.checks.sandbox.context import SECRET, CheckContext, CheckFailed, CheckSkipped
from turnwise.sandboxes.core import ExecResult, Sandbox

_PROGRAMS: Final = Path(__file__).parent / "programs.py"
_INSIDE: Final = ".turnwise-attacks"
_NO_PYTHON: Final = "there is no python3 inside: name an image with one, or mount one (spec.mounts and spec.env)"


@dataclass(slots=True)
class Fixtures:
    """The fixtures of one run of the checker.

    Attributes:
        secret: Content that nothing inside may learn.
        mark: In the victim's command line, and sent to servers by attackers.
        files: Host files: ``world`` (0644) and ``private`` (0600) hold the secret, ``open`` (0666) is world-writable,
            ``socket`` is a unix socket.
        note: How the running attack was contained, where that is noteworthy.
    """

    exam: CheckContext
    secret: str
    mark: str
    files: dict[str, Path]
    victim: int
    tcp_port: int
    udp_port: int
    addresses: list[str]
    _process: subprocess.Popen[bytes]
    note: str = ""
    _heard: dict[str, list[str]] = field(default_factory=dict)
    _taught: set[str] = field(default_factory=set)

    def victim_died(self) -> bool:
        """Return whether the victim process is gone; a new one is started then."""
        try:
            # A signal that was accepted has its effect at once, or within a moment on a busy machine.
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return False
        self._process = _victim(self.mark, self.secret)
        self.victim = self._process.pid
        return True

    def end(self) -> None:
        """Kill the victim process."""
        self._process.kill()
        self._process.wait()

    async def heard(self, kind: str) -> list[str]:
        """Return what a server received, after in-flight messages arrived."""
        # What is under way on the loopback is there within a turn of the loop or two; this takes two hundred.
        for _ in range(20):
            if self._heard.get(kind):
                break
            await asyncio.sleep(0.01)
        return self._heard.pop(kind, [])

    async def start(self, sandbox: Sandbox, name: str, given: dict[str, Any], *, timeout: float = 40.0) -> ExecResult:
        """Run an attack's program inside; CheckSkipped if there is no Python."""
        if sandbox.id not in self._taught:
            if not (await sandbox.exec(["python3", "-c", ""])).ok:
                raise CheckSkipped(_NO_PYTHON)
            await sandbox.write_file(f"{_INSIDE}/{_PROGRAMS.name}", _PROGRAMS.read_bytes())
            self._taught.add(sandbox.id)
        # The attack's input is not in its command line, which it may search for in /proc.
        command = ["python3", "-B", "-E", "-S", f"{_INSIDE}/{_PROGRAMS.name}", name]
        return await sandbox.exec(command, timeout=timeout, stdin=json.dumps(given).encode())

    async def attack(self, sandbox: Sandbox, name: str, given: dict[str, Any], *, may_die: bool = False) -> list[str]:
        """Run an attack's program with an input and return its findings, none if it died and ``may_die``.

        Raises CheckFailed (undecided), CheckSkipped (no Python inside) or SandboxDied.
        """
        result = await self.start(sandbox, name, given)
        lines = result.stdout.decode("utf-8", "replace").splitlines()
        if lines[:1] != ["begun"]:
            raise CheckFailed(f"the attack did not start: {result}")
        if len(lines) > 1 and result.ok:
            got: list[str] = json.loads(lines[-1])["got"]
            return got
        killed = result.exit_code > 128 or b"MemoryError" in result.stderr
        if may_die and killed and not result.timed_out:
            self.note = f"it was ended ({result.exit_code})"
            return []
        raise CheckFailed(f"the attack did not finish: {result}")


@contextlib.asynccontextmanager
async def planted(exam: CheckContext) -> AsyncIterator[Fixtures]:
    """Create the fixtures and remove them at the end."""
    secret, mark = os.environ[SECRET], f"{exam.token}-victim"
    folder = _seen_by_all()
    process = _victim(mark, secret)
    heard: dict[str, list[str]] = {}

    async def listen(kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if mark.encode() in await reader.readline():
            heard.setdefault(kind, []).append(f"a connection of the attacker ({kind})")
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
        lambda: _Datagrams(mark, heard), local_addr=("0.0.0.0", 0)
    )
    files = {name: folder / name for name in ("world", "private", "open", "socket")}
    for name, mode in (("world", 0o644), ("private", 0o600), ("open", 0o666)):
        files[name].write_text(secret if name != "open" else "untouched")
        files[name].chmod(mode)
    scene = Fixtures(
        exam,
        secret,
        mark,
        files,
        process.pid,
        tcp.sockets[0].getsockname()[1],
        transport.get_extra_info("sockname")[1],
        _addresses(),
        process,
        _heard=heard,
    )
    try:
        yield scene
    finally:
        scene.end()
        transport.close()
        for server in (tcp, *unix):
            server.close()
        shutil.rmtree(folder, ignore_errors=True)


def _victim(mark: str, secret: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(900)", mark]
    return subprocess.Popen(command, env={SECRET: secret}, stdin=subprocess.DEVNULL)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, mark: str, heard: dict[str, list[str]]) -> None:
        self._mark, self._heard = mark, heard

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        del addr
        if self._mark.encode() in data:
            self._heard.setdefault("udp", []).append("a datagram of the attacker")


def _seen_by_all() -> Path:
    """Create a folder that all users of this machine can enter, if possible."""
    for place in ("/var/tmp", "/tmp", tempfile.gettempdir()):
        base = Path(place)
        if (
            base.is_dir()
            and os.access(base, os.W_OK)
            and all(each.stat().st_mode & 1 for each in (base, *base.parents))
        ):
            break
    made = Path(tempfile.mkdtemp(prefix="turnwise-check-", dir=base))
    made.chmod(0o777)
    return made


def _addresses() -> list[str]:
    """Return this machine's non-loopback addresses; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [probe.getsockname()[0]]
