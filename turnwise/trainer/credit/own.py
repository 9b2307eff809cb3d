"""Credit by a function of the user's: of one trajectory, or of a whole group.

Owns: :func:`load_credit`, :class:`OwnCredit`, and holding what the function returns to its contract. Refuses: comparing
what turns are worth (``formulas.py``).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.errors import ConfigError, TrainError, shown
from turnwise.references import load_object
from turnwise.trainer.algorithm import CreditConfig
from turnwise.trainer.credit.formulas import Values
from turnwise.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class OwnCredit:
    """A function of the user's.

    Attributes:
        name: What the configuration calls it.
        function: It. Of one trajectory it returns what each turn is worth; of a group, for each trajectory the
            advantage of each turn.
        of_group: Whether it takes a group.
    """

    name: str
    function: Callable[[Any], Any]
    of_group: bool

    def worth(self, trajectory: Trajectory) -> Values:
        """Return what each turn of a trajectory is worth, in commit order.

        Raises:
            TrainError: The function raised, or returned something else.
        """
        return _numbers(self._call(trajectory, f"trajectory {trajectory.id}"), trajectory, self._what)

    def advantages(self, group: Sequence[Trajectory]) -> list[Values]:
        """Return the advantages of the turns of each trajectory of a group, in commit order.

        Raises:
            TrainError: The function raised, or returned something else.
        """
        where = f"group {group[0].group_id}"
        found = self._call(list(group), where)
        if not isinstance(found, (list, tuple)) or len(found) != len(group):
            raise TrainError(
                f"{self._what} {shown(found)} for {where}: it must be a list of {len(group)} lists, one for each "
                "trajectory in their order"
            )
        return [_numbers(each, trajectory, self._what) for each, trajectory in zip(found, group, strict=True)]

    @property
    def _what(self) -> str:
        return f"algorithm.credit {self.name!r} returned"

    def _call(self, argument: Any, where: str) -> Any:
        try:
            return self.function(argument)
        except Exception as error:  # a user's function: what it raises is named as its own
            what = f"algorithm.credit {self.name!r} raised {type(error).__name__} for {where}"
            raise TrainError(f"{what}: {error}") from error


def load_credit(config: CreditConfig) -> OwnCredit | None:
    """Return the user's function, or None where a named credit is configured.

    A function whose parameter is called ``group`` is one of a group, any other one of a trajectory.

    Raises:
        ConfigError: It cannot be loaded, or cannot be called with one argument.
    """
    if not config.custom:
        return None
    function = load_object(config.name, "algorithm.credit")
    try:
        bound = inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"algorithm.credit {config.name!r} cannot be called as f(trajectory) or f(group): {error}"
        ) from error
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"algorithm.credit {config.name!r} is async: write a plain function")
    return OwnCredit(config.name, function, "group" in bound.arguments)


def _numbers(values: Any, trajectory: Trajectory, what: str) -> Values:
    turns = sum(segment.sampled for segment in trajectory.segments)
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(listed, (list, tuple)) or len(listed) != turns:
        raise TrainError(
            f"{what} {shown(values)} for trajectory {trajectory.id}: it must be a list of {turns} numbers, one for "
            "each turn in commit order"
        )
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
            raise TrainError(f"{what} {shown(value)} for a turn of trajectory {trajectory.id}: not a finite number")
    return np.array(listed, np.float64)
