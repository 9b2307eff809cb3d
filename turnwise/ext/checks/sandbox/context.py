"""Context and report of the checker: sandboxes under test, assertions, process probes, outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from turnwise.errors import SandboxError, SandboxFileNotFound
from turnwise.sandboxes.config import SandboxConfig
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxBackend, SandboxSpec

SECRET: Final = "TURNWISE_CHECK_SECRET"
"""The environment variable of the host that nothing inside may see."""

_BEAT: Final = 0.05
_QUIET: Final = 0.35


class CheckFailed(Exception):
    """The backend violates the contract."""


class CheckSkipped(Exception):
    """The check does not apply here."""


def need(condition: bool, message: str) -> None:
    """Raise CheckFailed unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


@contextlib.contextmanager
def expect(*kinds: type[BaseException], what: str) -> Any:
    """Raise CheckFailed unless the block raises one of these errors."""
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds:
        return
    except (SandboxError, OSError) as error:
        raise CheckFailed(f"{what} raised {type(error).__name__} ({error}) instead of {names}") from error
    raise CheckFailed(f"{what} did not raise {names}")


async def soon(work: Awaitable[Any], seconds: float, what: str) -> Any:
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
    """

    backend: SandboxBackend
    config: SandboxConfig | None
    spec: SandboxSpec
    capabilities: Capabilities
    folder: Path
    token: str = field(default_factory=lambda: f"twcheck{uuid.uuid4().hex}")
    _shared: Sandbox | None = None

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

    def host_folder(self) -> Path:
        """Create an empty folder on the host."""
        made = self.folder / self.name()
        made.mkdir()
        return made

    async def close(self) -> None:
        """Close the shared sandbox."""
        if self._shared is not None:
            await self._shared.close()
            self._shared = None


def beating(file: str, token: str, *, hardened: bool = True) -> str:
    """Return a shell command that appends to a file forever, detached from signals and session if ``hardened``."""
    deaf = "trap '' TERM INT HUP; " if hardened else ""
    loop = f"{deaf}: {token}; while :; do echo >> {file}; sleep {_BEAT}; done"
    return f'S=$(command -v setsid || true); ($S sh -c "{loop}" </dev/null >/dev/null 2>&1 &)'


async def beats(sandbox: Sandbox, file: str) -> int:
    """Return the number of lines that :func:`beating` has written."""
    try:
        return len(await sandbox.read_file(file))
    except SandboxFileNotFound:
        return 0


async def alive(sandbox: Sandbox, file: str, seconds: float = 5.0) -> bool:
    """Return whether a file is still growing."""
    first = await beats(sandbox, file)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if await beats(sandbox, file) > first:
            return True
        await asyncio.sleep(_BEAT)
    return False


async def quiet(sandbox: Sandbox, file: str) -> bool:
    """Return whether a file has stopped growing."""
    before = await beats(sandbox, file)
    await asyncio.sleep(_QUIET)
    return await beats(sandbox, file) == before


def host_processes(token: str) -> list[int]:
    """Return host processes whose command line contains a token; empty without ``/proc``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if token.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found


async def gone(token: str, seconds: float = 5.0) -> bool:
    """Return whether no host process has the token in its command line, within some seconds."""
    until = time.monotonic() + seconds
    while host_processes(token):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_BEAT)
    return True


Status = Literal["passed", "failed", "held", "open", "escaped", "skipped"]

BAD: Final = frozenset({"failed", "escaped"})
"""The outcomes that break the contract."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a check or attack.

    Attributes:
        name: ``group: what``; attacks begin with ``attack``.
        status: Of a check: ``passed``, ``failed`` or ``skipped``. Of an attack: ``held``; ``escaped`` despite the
            claimed containment; ``open`` without one; ``failed`` if undecided.
        message: The violation, the attack's findings, or the reason for skipping.
        containment: The capability that claims to contain the attack, or ``always``; empty for checks.
        seconds: Duration.
    """

    name: str
    status: Status
    message: str = ""
    containment: str = ""
    seconds: float = 0.0

    @property
    def attack(self) -> bool:
        """Whether it is an attack."""
        return bool(self.containment)

    def __str__(self) -> str:
        held = f" [{self.containment}]" if self.containment else ""
        return f"{self.status} {self.name}{held}{f': {self.message}' if self.message else ''}"


@dataclass(slots=True)
class SandboxReport:
    """The result of :func:`~turnwise.ext.checks.sandbox.core.check_sandbox`: all outcomes in order of execution."""

    backend: str
    capabilities: Capabilities | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failures(self) -> list[Outcome]:
        """Outcomes that violate the contract."""
        return [each for each in self.outcomes if each.status in BAD]

    @property
    def attacks(self) -> list[Outcome]:
        """The outcomes of the attacks."""
        return [each for each in self.outcomes if each.attack]

    @property
    def ok(self) -> bool:
        """Whether at least one check ran, and none failed."""
        return not self.failures and any(each.status != "skipped" for each in self.outcomes)

    @property
    def summary(self) -> str:
        """One line of counts."""
        counted = {status: sum(1 for each in self.outcomes if each.status == status) for status in _ORDER}
        words = ", ".join(f"{count} {status}" for status, count in counted.items() if count)
        isolation = f" ({self.capabilities.isolation})" if self.capabilities else ""
        return f"{self.backend}{isolation}: {words or 'nothing was checked'}"

    def outcome(self, name: str) -> Outcome:
        """Return the outcome of a check. Raises KeyError."""
        for each in self.outcomes:
            if each.name == name:
                return each
        raise KeyError(name)

    def raise_for_failures(self) -> None:
        """Raise SandboxError unless :attr:`ok`, with all failures."""
        if not self.ok:
            raise SandboxError(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with ``ok``."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {each}" for each in self.failures)])


_ORDER: Final[tuple[Status, ...]] = ("passed", "held", "failed", "escaped", "open", "skipped")
