"""How much better than expected a trajectory was.

Owns: the registry of estimators (:data:`ADVANTAGES`, :func:`register_advantage`, :func:`advantage_fn`). Refuses:
configuration objects and trajectories; callers hand in numbers. Every estimator takes ``rewards, groups``, each of
shape [n], and by name what else it reads of :data:`ADVANTAGE_DATA` and its options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from turnwise.trainer.advantages.batch import gdpo, gpg, reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from turnwise.trainer.advantages.core import Advantages, whitened
from turnwise.trainer.advantages.critic import TokenAdvantages, critic_gae, token_rewards
from turnwise.trainer.advantages.group import dr_grpo, grpo, opo, passk, rloo
from turnwise.trainer.advantages.temporal import gae, gigpo, returns_to_go
from turnwise.trainer.registry import enter, find

AdvantageFn: TypeAlias = Callable[..., Advantages]

ADVANTAGE_ARGUMENTS = ("rewards", "groups")
ADVANTAGE_DATA = ("lengths", "components", "baselines")
"""What an estimator may ask for by name: sampled tokens of each trajectory, shape [n]; rewards by their name, each of
shape [n]; what the greedy rollout of its group earned, shape [n]: training rolls one out where somebody asks."""

ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "passk": passk,
    "gdpo": gdpo,
    "remax": remax,
}
"""Estimators by the name that a configuration uses."""

WITHOUT_GROUPS = frozenset({"gae", "reinforce_plus_plus", "remax"})
"""Those that hold a trajectory against something else than the others of its group: a group of one teaches, too."""
WITH_GROUPS = frozenset(ADVANTAGES) - WITHOUT_GROUPS
"""Those by which a group of one teaches nothing. What an estimator of the user's holds it against nobody here knows."""


def register_advantage(name: str, function: AdvantageFn | None = None) -> Any:
    """Give an estimator a name that ``algorithm.advantage`` takes; without a function, as the decorator of one.

    Args:
        name: The name.
        function: Called as every estimator is (:data:`ADVANTAGE_ARGUMENTS`, :data:`ADVANTAGE_DATA`).

    Returns:
        The function, or the decorator.

    Raises:
        RegistryError: The name is taken by another estimator.
    """

    def register(given: AdvantageFn) -> AdvantageFn:
        enter(name, given, ADVANTAGES, "estimator")
        return given

    return register if function is None else register(function)


CRITIC_ARGUMENTS = ("rewards", "values", "turns", "last_values")
CRITIC_ADVANTAGES: dict[str, Callable[..., list[TokenAdvantages]]] = {"gae": critic_gae}
"""Estimators that read the values of a critic, by the name that a configuration uses."""


def advantage_fn(name: str) -> Callable[..., Any]:
    """Return an estimator by its name, or a user's own by a reference (``pkg.mod:function``).

    Raises:
        RegistryError: No such estimator.
    """
    function: Callable[..., Any] = find(name, {**ADVANTAGES, **CRITIC_ADVANTAGES}, "algorithm.advantage")
    return function


__all__ = [
    "ADVANTAGES", "ADVANTAGE_ARGUMENTS", "ADVANTAGE_DATA", "CRITIC_ADVANTAGES", "CRITIC_ARGUMENTS", "WITHOUT_GROUPS",
    "WITH_GROUPS",
    "AdvantageFn", "Advantages", "TokenAdvantages", "advantage_fn", "critic_gae", "dr_grpo", "gae", "gdpo", "gigpo",
    "gpg", "grpo", "opo", "passk", "register_advantage", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
    "returns_to_go", "rloo", "token_rewards", "whitened",
]  # fmt: skip
