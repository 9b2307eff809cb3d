"""What the doctor says.

Owns: :class:`Finding` and :class:`CheckReport`. Refuses: printing; ``cli/check_env.py`` does that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from turnwise.errors import EnvError


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or that somebody should look at.

    Attributes:
        check: Which check found it.
        message: What is wrong.
        remedy: What to do about it.
        where: In which episode: task, seed, policy; empty where it is no matter of an episode.
        severity: ``error`` breaks the contract; ``warning`` may be meant so.
    """

    check: str
    message: str
    remedy: str = ""
    where: str = ""
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.check}: {self.message}{where}{f': {self.remedy}' if self.remedy else ''}"


@dataclass(slots=True)
class CheckReport:
    """What :func:`~turnwise.envs.doctor.core.check_env` found.

    Attributes:
        env: Name of the environment.
        checks: The checks that ran to their end, in order.
        skipped: The others, and why.
        findings: What they found.
        figures: Measured numbers, by name: lengths, seconds, megabytes, scores of the policies.
        notes: What a reader should know to read the figures.
    """

    env: str
    checks: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that break the contract."""
        return [each for each in self.findings if each.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """The findings that may be meant so."""
        return [each for each in self.findings if each.severity == "warning"]

    @property
    def ok(self) -> bool:
        """Whether nothing breaks the contract."""
        return not self.errors

    @property
    def summary(self) -> str:
        """One line: how much was checked and found."""
        words = f"{len(self.checks)} checks, {len(self.errors)} errors, {len(self.warnings)} warnings"
        return f"{self.env}: {words}{f', {len(self.skipped)} checks not run' if self.skipped else ''}"

    def raise_for_findings(self) -> None:
        """Raise EnvError with all findings, if there is an error among them."""
        if not self.ok:
            raise EnvError(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with ``ok``."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"  {finding.severity} {finding}" for finding in (*self.errors, *self.warnings)]
        return "\n".join([self.summary, *lines])
