"""Environments by name, and as what travels between processes.

Owns: :func:`register`, :func:`make` and :class:`EnvSpec`. Refuses: environment objects in the place of a spec; what
crosses a process is a name and a configuration.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from turnwise.envs.core import Env
from turnwise.errors import ConfigError, RegistryError
from turnwise.references import load_object
from turnwise.tools.registry import nearest

E = TypeVar("E", bound=type[Env])


@dataclass(frozen=True, slots=True)
class _Entry:
    entry_point: type[Env] | str
    config: Mapping[str, Any]

    @property
    def reference(self) -> str:
        if isinstance(self.entry_point, str):
            return self.entry_point
        return f"{self.entry_point.__module__}:{self.entry_point.__qualname__}"


_ENVS: dict[str, _Entry] = {
    "lookup": _Entry("turnwise.envs.lookup:LookupEnv", {}),
    "single_turn": _Entry("turnwise.envs.single_turn:SingleTurnEnv", {}),
}


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Which environment, and how it is made. Holds JSON values only.

    Attributes:
        id: A registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        config: Keyword arguments of its constructor.

    Raises:
        RegistryError: The configuration is not JSON.
    """

    id: str
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.config.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise RegistryError(
                    f"environment {self.id!r}: config[{key!r}] is {value!r}, which cannot travel between processes "
                    "(it is not JSON): give a name or reference instead"
                ) from error

    def make(self) -> Env:
        """Make the environment. Raises RegistryError."""
        return make(self.id, **self.config)

    def to_record(self) -> dict[str, Any]:
        """Return the spec as JSON values; ``EnvSpec(**record)`` reads it back."""
        return {"id": self.id, "config": self.config}


@overload
def register(name: str, /, **config: Any) -> Callable[[E], E]: ...
@overload
def register(name: str, entry_point: type[Env] | str, /, **config: Any) -> None: ...
def register(name: str, entry_point: type[Env] | str | None = None, /, **config: Any) -> Any:
    """Give an environment a name; without an entry point, as the decorator of its class.

    Args:
        name: The name: no ``:`` in it.
        entry_point: The class, or ``pkg.module:Class`` to import it when it is first made.
        **config: Defaults for its constructor.

    Raises:
        RegistryError: The name is taken by another environment.
    """
    if not name or ":" in name or name.endswith(".py"):
        raise RegistryError(f"{name!r} is no name for an environment: references hold a ':', names do not")

    def enter(cls: Any) -> Any:
        if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, Env)):
            raise RegistryError(f"environment {name!r} is {cls!r}: it must be a subclass of turnwise.Env")
        entry = _Entry(cls, config)
        known = _ENVS.get(name)
        if known is not None and known.reference != entry.reference:
            raise RegistryError(
                f"the environment name {name!r} is taken by {known.reference}; {entry.reference} needs another one"
            )
        _ENVS[name] = entry
        return cls

    if entry_point is None:
        return enter
    enter(entry_point)
    return None


def env_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_ENVS)


def make(name: str, /, **config: Any) -> Env:
    """Make an environment.

    Args:
        name: A registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        **config: Keyword arguments of its constructor, over the registered defaults.

    Raises:
        RegistryError: There is no such environment, or it does not take this configuration; the message says which
            names come close.
    """
    entry = _ENVS.get(name)
    if entry is None:
        if ":" not in name:
            raise RegistryError(
                f"there is no environment {name!r}{nearest(name, _ENVS)}; registered are {', '.join(env_names())}; any "
                "other is made by pkg.module:Class or path/to/file.py:Class"
            )
        entry = _Entry(name, {})
    cls: Callable[..., Env] = _load(name, entry)
    merged = {**entry.config, **config}
    signature = _signature(cls)
    try:
        signature.bind(**merged)
    except TypeError as error:
        takes = [each for each in signature.parameters if each not in ("args", "kwargs")]
        hints = "".join(nearest(each, takes) for each in merged if each not in takes)
        raise RegistryError(
            f"environment {name!r} does not take {merged}: {error}{hints}; its configuration is {signature}"
        ) from error
    return cls(**merged)


@functools.lru_cache(maxsize=256)
def _signature(cls: Callable[..., Env]) -> inspect.Signature:
    """Return what a class takes; reading it costs as much as some turns of an episode."""
    return inspect.signature(cls)


def _load(name: str, entry: _Entry) -> type[Env]:
    if not isinstance(entry.entry_point, str):
        return entry.entry_point
    try:
        cls = load_object(entry.entry_point, "environment")
    except ConfigError as error:
        raise RegistryError(str(error)) from error
    if not (isinstance(cls, type) and issubclass(cls, Env)):
        raise RegistryError(f"environment {name!r} is {cls!r}: it must be a subclass of turnwise.Env")
    return cls
