"""The budget of a run: limits of tokens and wall time, and how durations and counts are written."""

from __future__ import annotations

import math
import re
from typing import Annotated, Final, TypeAlias

from pydantic import BeforeValidator, Field

from turnwise.config import Section

_UNITS: Final = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_FACTORS: Final = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kMB]?)")
UNKNOWN_STEPS: Final = 10**9
"""Number of steps of a run whose length is not known yet: its schedule does not decay."""


def read_duration(value: object) -> object:
    """Parse a duration such as ``2h30m``, ``90s`` or ``1.5d`` into seconds; other types are returned unchanged.

    Raises:
        ValueError: A malformed string.
    """
    if not isinstance(value, str):
        return value
    text = value.replace(" ", "")
    if not _DURATION.fullmatch(text):
        try:
            return float(text)
        except ValueError:
            raise ValueError("seconds, or a duration such as 90s, 45m, 2h30m or 1d") from None
    return math.fsum(float(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[\d.]+[dhms]", text))


def read_count(value: object) -> object:
    """Parse a count such as ``500k``, ``2M`` or ``1.5B``; other types are returned unchanged.

    Raises:
        ValueError: A malformed string.
    """
    if not isinstance(value, str):
        return value
    match = _COUNT.fullmatch(value.replace("_", "").replace(",", ""))
    if match is None:
        raise ValueError("a number, or one such as 500k, 2M or 1.5B")
    return round(float(match[1]) * _FACTORS[match[2]])


Count: TypeAlias = Annotated[int, BeforeValidator(read_count), Field(gt=0)]
Seconds: TypeAlias = Annotated[float, BeforeValidator(read_duration), Field(gt=0, allow_inf_nan=False)]


class BudgetConfig(Section):
    """Limits of a run besides ``steps``. It ends after the step in which the first of them is spent.

    Attributes:
        trained_tokens: Sampled tokens that were trained, each counted once per step whatever the number of epochs.
        sampled_tokens: Tokens that the policy sampled for training, without evaluations.
        wall_time: Seconds, or a duration such as ``2h30m``, over all processes of the run, including loading and
            evaluation. A killed process counts up to its last checkpoint.
    """

    trained_tokens: Count | None = None
    sampled_tokens: Count | None = None
    wall_time: Seconds | None = None

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        limits = {
            "trained_tokens": self.trained_tokens,
            "sampled_tokens": self.sampled_tokens,
            "wall_time": self.wall_time,
        }
        return {name: float(limit) for name, limit in limits.items() if limit is not None}
