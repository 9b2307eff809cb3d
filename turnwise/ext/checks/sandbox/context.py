"""The context of the sandbox checker: sandboxes under test, probes of their processes, and assertions."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from turnwise.errors import SandboxError, SandboxFileNotFound
from turnwise.ext.checks.sandbox.fixtures import HostFixtures
from turnwise.ext.checks.sandbox.report import CheckFailed
from turnwise.sandboxes.config import SandboxConfig
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxBackend, SandboxSpec

_BEAT_S: Final = 0.05
_QUIET_S: Final = 0.35


def need(condition: bool, message: str) -> None:
    """Raise CheckFailed unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


def same(actual: object, expected: object, what: str) -> None:
    """Raise CheckFailed unless two values are equal."""
    need(actual == expected, f"{what}: {str(actual)[:400]!r} instead of {str(expected)[:400]!r}")


@contextlib.contextmanager
def expect(kind: type[BaseException], *, but: type[BaseException] | tuple[()] = (), what: str) -> Any:
    """Raise CheckFailed unless the block raises an error of one kind, and not of the narrower ``but``."""
    try:
        yield
    except (SandboxError, OSError, ValueError) as error:
        if not isinstance(error, kind) or isinstance(error, but):
            raise CheckFailed(f"{what} raised {type(error).__name__} ({error}) instead of {kind.__name__}") from error
    else:
        raise CheckFailed(f"{what} did not raise {kind.__name__}")


async def result_within(work: Awaitable[Any], seconds: float, what: str) -> Any:
    """Await a result; CheckFailed after ``seconds``."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise CheckFailed(f"{what} did not return within {seconds:g} s") from error


@dataclass(slots=True)
class CheckContext:
    """The context of one run of the checker.

    Attributes:
        config: The backend's configuration, for use in another process; None if only the object is known.
        spec: Base spec of the sandboxes.
        folder: Scratch folder on the host.
        token: Marker in the command lines of processes that checks leave running.
        fixtures: What the attacks aim at on the host; None outside of attacks.
    """

    backend: SandboxBackend
    config: SandboxConfig | None
    spec: SandboxSpec
    capabilities: Capabilities
    folder: Path
    token: str = field(default_factory=lambda: f"twcheck{uuid.uuid4().hex}")
    fixtures: HostFixtures | None = None
    _shared: Sandbox | None = None

    @property
    def host(self) -> HostFixtures:
        """The fixtures of the attacks."""
        assert self.fixtures is not None
        return self.fixtures

    @property
    def claims(self) -> dict[str, Any]:
        """Whether each isolation or feature is claimed by the capabilities, ``always`` included."""
        network = self.capabilities.network and not self.spec.limits.network
        siblings = self.capabilities.siblings and self.spec.user is None
        return {**asdict(self.capabilities), "network": network, "siblings": siblings, "always": True}

    @property
    def rooted(self) -> bool:
        """Whether sandboxes have their own root file system; without images they show the host's."""
        return self.capabilities.images

    async def sandbox(self) -> Sandbox:
        """Return the shared sandbox; a new one if it no longer responds."""
        if self._shared is not None:
            try:
                if (await self._shared.exec(["true"], timeout=10)).ok:
                    return self._shared
            except SandboxError:
                pass
            with contextlib.suppress(SandboxError):
                await self._shared.close()
            self._shared = None
        sandbox = self.backend.make(self.spec)
        await sandbox.start()
        self._shared = sandbox
        return sandbox

    @contextlib.asynccontextmanager
    async def fresh(self, **changes: Any) -> AsyncIterator[Sandbox]:
        """Start a sandbox of a modified spec, closed at the end."""
        sandbox = self.backend.make(replace(self.spec, **changes))
        try:
            await sandbox.start()
            yield sandbox
        finally:
            await sandbox.close()

    def name(self) -> str:
        """Return an unused file name."""
        return f"check-{uuid.uuid4().hex[:12]}"

    async def scratch(self) -> tuple[Sandbox, str]:
        """Return the shared sandbox, and a file name that is unused in it."""
        return await self.sandbox(), self.name()

    def host_folder(self) -> Path:
        """Create an empty folder on the host."""
        folder = self.folder / self.name()
        folder.mkdir()
        return folder

    async def close(self) -> None:
        """Close the shared sandbox."""
        if self._shared is not None:
            await self._shared.close()
            self._shared = None


@contextlib.asynccontextmanager
async def forks_of(sandbox: Sandbox, count: int = 1) -> AsyncIterator[list[Sandbox]]:
    """Fork a sandbox; the forks, and what is added to them, are closed at the end."""
    forks = list(await sandbox.fork(count))
    try:
        yield forks
    finally:
        for fork in forks:
            await fork.close()


def endless_writer(file: str, token: str, *, hardened: bool = True) -> str:
    """Return a shell command that appends to a file forever, detached from signals and session if ``hardened``."""
    ignore_signals = "trap '' TERM INT HUP; " if hardened else ""
    loop = f"{ignore_signals}: {token}; while :; do echo >> {file}; sleep {_BEAT_S}; done"
    return f'S=$(command -v setsid || true); ($S sh -c "{loop}" </dev/null >/dev/null 2>&1 &)'


async def lines_written(sandbox: Sandbox, file: str) -> int:
    """Return the number of lines that :func:`endless_writer` has written."""
    try:
        return len(await sandbox.read_file(file))
    except SandboxFileNotFound:
        return 0


async def keeps_writing(sandbox: Sandbox, file: str, seconds: float = 5.0) -> bool:
    """Return whether a file is still growing."""
    first = await lines_written(sandbox, file)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if await lines_written(sandbox, file) > first:
            return True
        await asyncio.sleep(_BEAT_S)
    return False


async def stopped_writing(sandbox: Sandbox, file: str) -> bool:
    """Return whether a file has stopped growing."""
    length = await lines_written(sandbox, file)
    await asyncio.sleep(_QUIET_S)
    return await lines_written(sandbox, file) == length


def host_processes(token: str) -> list[int]:
    """Return host processes whose command line contains a token; empty without ``/proc``."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if token.encode() in (folder / "cmdline").read_bytes():
                    pids.append(int(folder.name))
    return pids


async def processes_ended(token: str, seconds: float = 5.0) -> bool:
    """Return whether no host process has the token in its command line, within some seconds."""
    until = time.monotonic() + seconds
    while host_processes(token):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_BEAT_S)
    return True
