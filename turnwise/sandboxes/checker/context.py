"""What checks have in common: the sandbox under examination, fresh ones, and how a check says that it fails."""

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
    """The backend does not keep the contract; the message says how."""


class CheckSkipped(Exception):
    """There is nothing to examine here; the message says why."""


def need(condition: bool, message: str) -> None:
    """Fail the check unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


@contextlib.contextmanager
def expect(*kinds: type[BaseException], what: str) -> Any:
    """Fail the check unless the block raises one of these errors."""
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds:
        return
    except (SandboxError, OSError) as error:
        raise CheckFailed(f"{what} raised {type(error).__name__} ({error}) instead of {names}") from error
    raise CheckFailed(f"{what} did not raise {names}")


async def soon(work: Awaitable[Any], seconds: float, what: str) -> Any:
    """Return the result of what has to be there within some seconds; the check fails otherwise."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise CheckFailed(f"{what} did not return within {seconds:g} s") from error


@dataclass(slots=True)
class CheckContext:
    """One examination.

    Attributes:
        backend: What is examined.
        config: How to open the same backend in another process; None where only the object is known.
        spec: What the sandboxes are asked for, before what a check changes.
        capabilities: What the backend says of itself.
        folder: Scratch folder on the host.
        token: A word that stands in the command line of what the examination leaves running.
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
        """Whether sandboxes have a root file system of their own.

        A backend that takes no images has none: what is outside the workdir is the host's, and the workdir and what is
        mounted are where the backend puts them.
        """
        return self.capabilities.images

    async def sandbox(self) -> Sandbox:
        """Return the sandbox that checks share which leave it well; a new one where it does not answer any more."""
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
        """Start a sandbox of its own, of a spec with changes; it is closed at the end."""
        sandbox = self.backend.make(replace(self.spec, **changes))
        try:
            await sandbox.start()
            yield sandbox
        finally:
            await sandbox.close()

    def name(self) -> str:
        """Return a name that no file in a sandbox has."""
        return f"check-{uuid.uuid4().hex[:12]}"

    def host_folder(self) -> Path:
        """Return a new empty folder on the host."""
        made = self.folder / self.name()
        made.mkdir()
        return made

    async def close(self) -> None:
        """Close the shared sandbox."""
        if self._shared is not None:
            await self._shared.close()
            self._shared = None


def beating(file: str, token: str, *, hardened: bool = True) -> str:
    """Return a shell command that goes on for ever and appends to a file all the time.

    It detaches itself as far as a shell can: forked twice, in a session of its own where there is ``setsid``, deaf to
    TERM, INT and HUP.
    """
    deaf = "trap '' TERM INT HUP; " if hardened else ""
    loop = f"{deaf}: {token}; while :; do echo >> {file}; sleep {_BEAT}; done"
    return f'S=$(command -v setsid || true); ($S sh -c "{loop}" </dev/null >/dev/null 2>&1 &)'


async def beats(sandbox: Sandbox, file: str) -> int:
    """Return how often what :func:`beating` started has written so far."""
    try:
        return len(await sandbox.read_file(file))
    except SandboxFileNotFound:
        return 0


async def alive(sandbox: Sandbox, file: str, seconds: float = 5.0) -> bool:
    """Tell whether what writes to a file goes on writing."""
    first = await beats(sandbox, file)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if await beats(sandbox, file) > first:
            return True
        await asyncio.sleep(_BEAT)
    return False


async def quiet(sandbox: Sandbox, file: str) -> bool:
    """Tell whether nothing writes to a file any more."""
    before = await beats(sandbox, file)
    await asyncio.sleep(_QUIET)
    return await beats(sandbox, file) == before


def host_processes(token: str) -> list[int]:
    """Return the processes of this machine whose command line has a word in it; empty where ``/proc`` tells nothing."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if token.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found


async def gone(token: str, seconds: float = 5.0) -> bool:
    """Tell whether no process of this machine has a word in its command line, now or within some seconds."""
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
    """How one check or attack ended.

    Attributes:
        name: Its name, ``group: what``; that of an attack begins with ``attack``.
        status: Of a check: ``passed``, ``failed`` or ``skipped``. Of an attack: ``held``; ``escaped``, where the
            capabilities promise that it is held back; ``open``, where they say that it is not; ``failed``, where the
            attack itself could not be made, so that nothing is known.
        message: What went wrong, what the attack got, or why it was skipped.
        containment: The field of the capabilities that promises to hold the attack back; ``always`` where every
            sandbox has to; empty for what is no attack.
        seconds: How long it took.
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
    """What :func:`~turnwise.sandboxes.checker.core.check_sandbox` found.

    Attributes:
        backend: The registered name of the backend.
        capabilities: What it says it holds back; None where it cannot be had here.
        outcomes: One for each check and attack, in the order in which they ran.
    """

    backend: str
    capabilities: Capabilities | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failures(self) -> list[Outcome]:
        """What breaks the contract."""
        return [each for each in self.outcomes if each.status in BAD]

    @property
    def attacks(self) -> list[Outcome]:
        """The outcomes of the attacks."""
        return [each for each in self.outcomes if each.attack]

    @property
    def ok(self) -> bool:
        """Whether something was examined, and nothing breaks the contract."""
        return not self.failures and any(each.status != "skipped" for each in self.outcomes)

    @property
    def summary(self) -> str:
        """One line: how much was checked and found."""
        counted = {status: sum(1 for each in self.outcomes if each.status == status) for status in _ORDER}
        words = ", ".join(f"{count} {status}" for status, count in counted.items() if count)
        isolation = f" ({self.capabilities.isolation})" if self.capabilities else ""
        return f"{self.backend}{isolation}: {words or 'nothing was checked'}"

    def outcome(self, name: str) -> Outcome:
        """Return the outcome of the check of that name.

        Raises:
            KeyError: It did not run.
        """
        for each in self.outcomes:
            if each.name == name:
                return each
        raise KeyError(name)

    def raise_for_failures(self) -> None:
        """Raise SandboxError with all that breaks the contract, if anything does or nothing was examined."""
        if not self.ok:
            raise SandboxError(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with ``ok``."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {each}" for each in self.failures)])


_ORDER: Final[tuple[Status, ...]] = ("passed", "held", "failed", "escaped", "open", "skipped")
