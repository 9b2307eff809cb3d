"""How long a run goes on: steps, tokens or wall time, whichever is spent first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from turnwise.trainer.config.train import UNKNOWN_STEPS, BudgetConfig


def show_duration(seconds: float) -> str:
    """Return seconds as a configuration has them (``2h30m``), in the two largest units that are not empty."""
    left, parts = round(seconds), []
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"


@dataclass(slots=True)
class Budget:
    """What a run may spend, and what it has spent.

    Attributes:
        limits: By name: ``steps`` and those of :class:`BudgetConfig`.
        spent: The same names; a name that is missing stands at 0.
    """

    limits: dict[str, float]
    spent: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: int | None, config: BudgetConfig, spent: Mapping[str, float]) -> Budget:
        """Make the budget of a run.

        Args:
            steps: How many train steps it may have; None limits them not.
            config: What else it may spend.
            spent: What it has spent (``state`` of an earlier one).
        """
        limits = config.limits if steps is None else {"steps": float(steps), **config.limits}
        return cls(limits, {name: float(value) for name, value in spent.items()})

    def spend(self, **amounts: float) -> None:
        """Add to what is spent."""
        for name, amount in amounts.items():
            self.spent[name] = self.spent.get(name, 0.0) + amount

    def shares(self) -> dict[str, float]:
        """Return the share of each limit that is spent; above 1 where the last step went beyond it."""
        return {name: self.spent.get(name, 0.0) / limit for name, limit in self.limits.items()}

    @property
    def nearest(self) -> tuple[str, float]:
        """The limit of which the largest share is spent, and that share; of equal ones the first."""
        shares = self.shares()
        name = max(shares, key=lambda each: shares[each])
        return name, shares[name]

    @property
    def ended(self) -> str | None:
        """The limit that is spent, or None: the run goes on."""
        name, share = self.nearest
        return name if share >= 1 else None

    def expected_steps(self, under_way: Mapping[str, float] | None = None) -> int:
        """Return how many train steps the run will have had in the end, as far as that can be told now.

        Where the steps are the nearest limit, that is their number. Else it is extrapolated from the nearest one: the
        steps so far divided by the share that they spent. So a learning-rate schedule ends where the run ends, and in
        a run that has no other limit than its steps nothing is extrapolated.

        Args:
            under_way: Limits of which a step that has begun and is not counted yet has spent some already: which share
                of what it will spend.
        """
        begun = under_way or {}
        done = self.spent.get("steps", 0.0)
        planned = self.limits.get("steps")
        others = {name: share for name, share in self.shares().items() if name != "steps" and share}
        if not others or not done:
            return UNKNOWN_STEPS if planned is None else round(planned)
        found = min((done + begun.get(name, 0.0)) / share for name, share in others.items())
        one_more = bool(begun) or max(others.values()) < 1
        # Not one more for the last bits of a quotient.
        expected = max(math.ceil(found - 1e-9), round(done) + one_more)
        return expected if planned is None else min(expected, round(planned))

    def describe(self) -> str:
        """Return the limits in words: ``40 steps, 2,000,000 trained tokens``."""
        return ", ".join(_words(name, limit) for name, limit in self.limits.items())

    def why(self, ended: str | None) -> str:
        """Return in words that a limit ended the run, or that none did."""
        if ended is None:
            return f"the algorithm ended it, within {self.describe()}"
        return f"{_words(ended, self.limits[ended])} are spent"


def _words(name: str, amount: float) -> str:
    return f"{show_duration(amount)} of wall time" if name == "wall_time" else f"{amount:,.0f} {name.replace('_', ' ')}"
