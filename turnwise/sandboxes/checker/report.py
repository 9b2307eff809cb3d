"""What the examination of a sandbox says.

Owns: :class:`Outcome` and :class:`SandboxReport`. Refuses: printing; ``cli/check_sandbox.py`` does that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from turnwise.errors import SandboxError
from turnwise.sandboxes.core import Capabilities

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
