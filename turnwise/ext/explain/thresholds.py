"""The thresholds of the findings, each with its reason, in ``thresholds.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple


class Threshold(NamedTuple):
    """A bound of a rule, and why it is where it is."""

    value: float
    reason: str


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
THRESHOLDS: Final[Mapping[str, Threshold]] = {name: Threshold(**row) for name, row in _ROWS.items()}
"""All thresholds by name; docs/training.md shows them."""


def bound(name: str) -> float:
    """Return the value of a threshold."""
    return THRESHOLDS[name].value
