"""A finding: what holds learning back, its evidence, its share of the lost signal, and what to change."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, Self


class Level(IntEnum):
    """How much a finding holds learning back."""

    NOTE = 0
    WARNING = 1
    PROBLEM = 2


class Kind(NamedTuple):
    """What all findings of a name have in common; an earlier stage explains what later ones show."""

    stage: str
    keys: Sequence[str]
    remedy: str


class Threshold(NamedTuple):
    """A bound of a rule, and why it is where it is."""

    value: float
    reason: str


STAGES: Final = ("setup", "reward", "tools", "limits", "groups", "updates")
_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
KINDS: Final[Mapping[str, Kind]] = {name: Kind(**row) for name, row in _ROWS.items()}
"""All findings that there are, by name."""
_BOUNDS = tomllib.loads(Path(__file__).with_name("thresholds.toml").read_text("utf-8"))
THRESHOLDS: Final[Mapping[str, Threshold]] = {name: Threshold(**row) for name, row in _BOUNDS.items()}
"""All thresholds by name."""
_POLICY: Final = "POLICY"


def bound(name: str) -> float:
    """Return the value of a threshold."""
    return THRESHOLDS[name].value


@dataclass(frozen=True, slots=True)
class Finding:
    """What holds learning back.

    Attributes:
        name: One of :data:`KINDS`.
        share: Share of the sampled tokens from which nothing, or what is wrong, is learned because of it.
        text: One sentence.
        evidence: Turns, tokens, template lines, tools, tasks and steps that show it.
        keys: Configuration keys to change, by their dotted names.
    """

    name: str
    level: Level
    share: float
    text: str
    evidence: tuple[str, ...]
    keys: tuple[str, ...]

    @classmethod
    def of(
        cls, name: str, level: Level, share: float, text: str, *evidence: str, keys: Sequence[str] | None = None
    ) -> Self:
        """Return a finding of a kind; empty texts are no evidence."""
        lines = tuple(line for line in evidence if line)
        return cls(name, level, min(1.0, share), text, lines, tuple(KINDS[name].keys if keys is None else keys))

    @property
    def stage(self) -> str:
        """Where its cause lies, one of :data:`STAGES`."""
        return KINDS[self.name].stage

    def of_policy(self, section: str) -> Finding:
        """Return it with the keys of a trained policy."""
        return replace(self, keys=tuple(key.replace(_POLICY, section) for key in self.keys))

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return {
            **asdict(self),
            "level": self.level.name.lower(),
            "stage": self.stage,
            "remedy": KINDS[self.name].remedy,
        }


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by level, then by stage, then by share: the one to act on first."""
    return tuple(sorted(findings, key=lambda finding: (-finding.level, STAGES.index(finding.stage), -finding.share)))


def level_of(share: float) -> Level:
    """Return the level of a loss by its share of the signal."""
    if share >= bound("problem_share"):
        return Level.PROBLEM
    return Level.WARNING if share >= bound("warning_share") else Level.NOTE


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def counted(counts: Iterable[tuple[str, int]], limit: int = 3) -> tuple[str, ...]:
    """Return the first entries of counts as texts."""
    return tuple(f"{count} x {label}" for label, count in list(counts)[:limit])


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names as text."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
