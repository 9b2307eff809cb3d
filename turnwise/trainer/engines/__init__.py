"""Learners by name.

Owns: the registry :data:`ENGINES` and :func:`find_engine`. Refuses: the contract (``trainer/learner.py``).
"""

from __future__ import annotations

from turnwise.errors import RegistryError
from turnwise.trainer.engines.torch import TorchLearner
from turnwise.trainer.learner import Learner
from turnwise.trainer.registry import find

ENGINES: dict[str, type[Learner]] = {"torch": TorchLearner}
"""Learners by the name that a configuration uses."""


def find_engine(name: str) -> type[Learner]:
    """Return a learner's class by its name, or a user's own by a reference (``pkg.mod:Class``).

    Raises:
        RegistryError: No such learner, or what the reference names is none.
    """
    found = find(name, ENGINES, "engine")
    if not (isinstance(found, type) and issubclass(found, Learner)):
        raise RegistryError(f"engine is {name!r}, which is no class that derives from turnwise.trainer.learner.Learner")
    return found
