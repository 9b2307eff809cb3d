"""The budget of a run: steps, tokens or wall time, whichever is spent first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from turnwise.trainer.config.budget import UNKNOWN_STEPS, BudgetConfig


def show_duration(seconds: float) -> str:
    """Return seconds as a configuration has them (``2h30m``), in the two largest units that are not empty."""
    rest, parts = round(seconds), []
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"


@dataclass(slots=True)
class Budget:
    """Limits of a run, and the amounts spent.

    Attributes:
        limits: By name: ``steps`` and those of :class:`BudgetConfig`.
        spent: By the same names; a missing name is 0.
    """

    limits: dict[str, float]
    spent: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: int | None, config: BudgetConfig, spent: Mapping[str, float]) -> Budget:
        """Create the budget of a run; ``spent`` is the state of an earlier process."""
        limits = config.limits if steps is None else {"steps": float(steps), **config.limits}
        return cls(limits, {name: float(value) for name, value in spent.items()})

    def spend(self, **amounts: float) -> None:
        """Add to the amounts spent."""
        for name, amount in amounts.items():
            self.spent[name] = self.spent.get(name, 0.0) + amount

    def shares(self) -> dict[str, float]:
        """Return the spent share of each limit; may exceed 1 after the last step."""
        return {name: self.spent.get(name, 0.0) / limit for name, limit in self.limits.items()}

    @property
    def nearest(self) -> tuple[str, float]:
        """The limit with the largest spent share, and that share."""
        shares = self.shares()
        name = max(shares, key=lambda limit: shares[limit])
        return name, shares[name]

    @property
    def ended(self) -> str | None:
        """The limit that is spent, or None."""
        name, share = self.nearest
        return name if share >= 1 else None

    def expected_steps(self, under_way: Mapping[str, float] | None = None) -> int:
        """Estimate the train steps of the whole run, for the learning-rate schedule.

        Exact if the step limit is the nearest, else the steps so far divided by the spent share of the nearest limit.
        ``under_way`` has, by limit, the share of the current, uncounted step's consumption that is already spent.
        """
        pending = under_way or {}
        done = self.spent.get("steps", 0.0)
        planned = self.limits.get("steps")
        rates = {name: share for name, share in self.shares().items() if name != "steps" and share}
        if not rates or not done:
            return UNKNOWN_STEPS if planned is None else round(planned)
        steps = min((done + pending.get(name, 0.0)) / share for name, share in rates.items())
        one_more = bool(pending) or max(rates.values()) < 1
        # Not one more for the last bits of a quotient.
        expected = max(math.ceil(steps - 1e-9), round(done) + one_more)
        return expected if planned is None else min(expected, round(planned))

    def describe(self) -> str:
        """Describe the limits: ``40 steps, 2,000,000 trained tokens``."""
        return ", ".join(_describe_amount(name, limit) for name, limit in self.limits.items())

    def why(self, limit: str | None) -> str:
        """Describe the limit that ended the run, if any."""
        if limit is None:
            return f"the algorithm ended it, within {self.describe()}"
        return f"{_describe_amount(limit, self.limits[limit])} are spent"


def _describe_amount(name: str, amount: float) -> str:
    return f"{show_duration(amount)} of wall time" if name == "wall_time" else f"{amount:,.0f} {name.replace('_', ' ')}"
