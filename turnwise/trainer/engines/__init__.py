"""Learners by name.

Owns: the registry :data:`ENGINES`, :func:`register_engine`, :func:`find_engine` and :func:`open_learner`. Refuses: the
contract (``trainer/learner.py``), and importing an engine before somebody asks for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

from turnwise.errors import RegistryError
from turnwise.references import load_object
from turnwise.trainer.algorithms.registry import Chosen, bind, enter, find
from turnwise.trainer.config import PolicyConfig
from turnwise.trainer.learner import Learner

L = TypeVar("L", bound=type[Learner])

ENGINES: dict[str, type[Learner] | str] = {"torch": "turnwise.trainer.engines.torch:TorchLearner"}
"""Learners by the name that a configuration uses: classes, or references to them."""


@overload
def register_engine(name: str) -> Callable[[L], L]: ...
@overload
def register_engine(name: str, engine: L) -> L: ...
def register_engine(name: str, engine: Any = None) -> Any:
    """Give a learner a name that ``policies.main.engine`` takes; without a class, as the decorator of one.

    Args:
        name: The name.
        engine: A class that derives from :class:`~turnwise.trainer.learner.Learner`.

    Raises:
        RegistryError: The name is taken by another engine, or the class is none.
    """

    def register(cls: Any) -> Any:
        _check(name, cls)
        enter(name, cls, ENGINES, "engine", of=_loaded)
        return cls

    return register if engine is None else register(engine)


def find_engine(name: str) -> type[Learner]:
    """Return a learner's class by its name, or a user's own by a reference (``pkg.mod:Class``).

    Raises:
        RegistryError: No such learner, or what the reference names is none.
    """
    found = _loaded(find(name, ENGINES, "engine"))
    _check(name, found)
    engine: type[Learner] = found
    return engine


def chosen_engine(config: PolicyConfig) -> Chosen:
    """Return the engine's ``create`` with the options that a configuration gives it, checked.

    Raises:
        RegistryError: There is no such engine, or it does not take these options.
    """
    engine = find_engine(config.engine)
    return bind(
        config.engine,
        engine.create,
        config.engine_options,
        key="policy.engine_options",
        arguments=("config", "total_steps"),
        data=("model_path",),
    )


def open_learner(config: PolicyConfig, total_steps: int, *, model_path: Path | None = None) -> Learner:
    """Make the learner that a configuration names; see :meth:`~turnwise.trainer.learner.Learner.create`.

    Raises:
        RegistryError: There is no such engine, or it does not take its options.
        TrainError: The model cannot be loaded or trained.
    """
    learner: Learner = chosen_engine(config)(config, total_steps, model_path=model_path)
    return learner


def _loaded(engine: Any) -> Any:
    return load_object(engine, "engine") if isinstance(engine, str) else engine


def _check(name: str, engine: Any) -> None:
    if not (isinstance(engine, type) and issubclass(engine, Learner)):
        raise RegistryError(f"engine {name!r} is {engine!r}: it must derive from turnwise.trainer.learner.Learner")
    if inspect.isabstract(engine):
        lacks = ", ".join(sorted(engine.__abstractmethods__))
        raise RegistryError(f"engine {name!r} ({engine.__module__}:{engine.__qualname__}) does not define {lacks}")
