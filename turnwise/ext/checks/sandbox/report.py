"""Outcomes of the sandbox checker, and their report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from turnwise.errors import SandboxError
from turnwise.sandboxes.core import Capabilities


class CheckFailed(Exception):
    """The backend violates the contract, or an attack is undecided."""


class CheckSkipped(Exception):
    """The check does not apply here."""


Status = Literal["passed", "failed", "held", "open", "escaped", "skipped"]

FAILURES: Final = frozenset({"failed", "escaped"})
"""The statuses that violate the contract."""
_ORDER: Final[tuple[Status, ...]] = ("passed", "held", "failed", "escaped", "open", "skipped")


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
        containment = f" [{self.containment}]" if self.containment else ""
        return f"{self.status} {self.name}{containment}{f': {self.message}' if self.message else ''}"


@dataclass(slots=True)
class SandboxReport:
    """The result of :func:`~turnwise.ext.checks.sandbox.core.check_sandbox`: all outcomes in order of execution."""

    backend: str
    capabilities: Capabilities | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failures(self) -> list[Outcome]:
        """Outcomes that violate the contract."""
        return [outcome for outcome in self.outcomes if outcome.status in FAILURES]

    @property
    def attacks(self) -> list[Outcome]:
        """The outcomes of the attacks."""
        return [outcome for outcome in self.outcomes if outcome.attack]

    @property
    def ok(self) -> bool:
        """Whether at least one check ran, and none failed."""
        return not self.failures and any(outcome.status != "skipped" for outcome in self.outcomes)

    @property
    def summary(self) -> str:
        """One line of counts."""
        counts = {status: sum(1 for outcome in self.outcomes if outcome.status == status) for status in _ORDER}
        words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        isolation = f" ({self.capabilities.isolation})" if self.capabilities else ""
        return f"{self.backend}{isolation}: {words or 'nothing was checked'}"

    def outcome(self, name: str) -> Outcome:
        """Return the outcome of a check. Raises KeyError."""
        for outcome in self.outcomes:
            if outcome.name == name:
                return outcome
        raise KeyError(name)

    def raise_for_failures(self) -> None:
        """Raise SandboxError unless :attr:`ok`, with all failures."""
        if not self.ok:
            raise SandboxError(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with ``ok``."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {outcome}" for outcome in self.failures)])
