"""The registry of environments, and EnvSpec, their serialisable form."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from turnwise.config import load_config
from turnwise.envs.core import Env
from turnwise.envs.wrappers import wrap
from turnwise.errors import ConfigError, RegistryError, nearest
from turnwise.plugins import load_object, references
from turnwise.tools.config import ToolsConfig
from turnwise.tools.core import Tool
from turnwise.tools.selection import Toolbox

E = TypeVar("E", bound=type[Env])


_GYMNASIUM_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class _Entry:
    entry_point: type[Env] | str
    config: Mapping[str, Any]

    @property
    def reference(self) -> str:
        if isinstance(self.entry_point, str):
            return self.entry_point
        return f"{self.entry_point.__module__}:{self.entry_point.__qualname__}"


_BASIC = "turnwise.envs.basic"
_ENVS: dict[str, _Entry] = {
    name: _Entry(reference, {})
    for name, reference in {
        "guess_number": f"{_BASIC}.guess_number:GuessNumberEnv",
        "gymnasium": "turnwise.envs.gym.from_gymnasium:GymnasiumEnv",
        "gymnasium_tools": "turnwise.envs.gym.from_gymnasium:GymnasiumToolEnv",
        "lookup": f"{_BASIC}.lookup:LookupEnv",
        "single_turn": "turnwise.envs.single_turn:SingleTurnEnv",
        "task": f"{_BASIC}.task_env:TaskEnv",
        "tool": f"{_BASIC}.task_env:TaskToolEnv",
        **references("environments"),
    }.items()
}
_PREFIXES: dict[str, str] = references("environment_families")
"""References to functions from prefix and rest of a name, such as ``reasoning-gym:chain_sum``, to its class."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """An environment with its configuration, as JSON values.

    Attributes:
        id: A registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        config: Keyword arguments of its constructor.
        tools: Tools besides those of its class: the fields of a ToolsConfig.
        wrappers: Wrappers, innermost first: each ``{"name": ..., "config": {...}}``.
    """

    id: str
    config: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, Any] = field(default_factory=dict)
    wrappers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbered = {str(number): wrapper for number, wrapper in enumerate(self.wrappers)}
        sections = {"config": self.config, "tools": self.tools, "wrappers": numbered}
        values = ((f"{part}[{key!r}]", value) for part, section in sections.items() for key, value in section.items())
        for key, value in values:
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise RegistryError(
                    f"environment {self.id!r}: {key} is {value!r}, which cannot be sent between processes "
                    "(it is not JSON): give a name or reference instead"
                ) from error

    def toolbox(self) -> Toolbox:
        """Return what loads the tools and closes them; see :class:`~turnwise.tools.selection.Toolbox`."""
        return Toolbox(load_config(ToolsConfig, defaults=self.tools))

    def make(self, tools: Sequence[Tool] = ()) -> Env:
        """Make the environment.

        Raises:
            RegistryError: The environment is unknown, or refuses its configuration.
            ConfigError: It cannot offer these tools, or a wrapper cannot be made.
        """
        env = make(self.id, **self.config)
        if tools:
            env.add_tools(tools)
        for wrapper in self.wrappers:
            env = wrap(env, wrapper["name"], **wrapper.get("config", {}))
        return env

    def to_record(self) -> dict[str, Any]:
        """Return the spec as JSON values; ``EnvSpec(**record)`` is the inverse."""
        return {"id": self.id, "config": self.config, "tools": self.tools, "wrappers": self.wrappers}


@overload
def register(name: str, /, **config: Any) -> Callable[[E], E]: ...
@overload
def register(name: str, entry_point: type[Env] | str, /, **config: Any) -> None: ...
def register(name: str, entry_point: type[Env] | str | None = None, /, **config: Any) -> Any:
    """Register an environment; without an entry point, as a decorator of its class.

    Args:
        name: The name, without ``:``.
        entry_point: The class, or ``pkg.module:Class``, imported on first use.
        **config: Defaults for its constructor.

    Raises:
        RegistryError: The name is taken by another environment.
    """
    if not name or ":" in name or name.endswith(".py"):
        raise RegistryError(f"{name!r} is not a name for an environment: references hold a ':', names do not")

    def register_class(cls: Any) -> Any:
        if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, Env)):
            raise RegistryError(f"environment {name!r} is {cls!r}: it must be a subclass of turnwise.Env")
        entry = _Entry(cls, config)
        registered = _ENVS.get(name)
        if registered is not None and registered.reference != entry.reference:
            raise RegistryError(
                f"the environment name {name!r} is taken by {registered.reference}; {entry.reference} needs another "
                "name"
            )
        _ENVS[name] = entry
        register_with_gymnasium(name)
        return cls

    if entry_point is None:
        return register_class
    register_class(entry_point)
    return None


def register_prefix(prefix: str, reference: str) -> None:
    """Register a family of environments: ``prefix:REST`` is then the class that a function returns for both.

    A registered prefix comes before references: ``gem:X`` is an environment of gem, also where a module is called so.

    Args:
        prefix: What stands before the first colon.
        reference: ``pkg.module:function`` of ``(prefix, rest)``, imported on first use.

    Raises:
        RegistryError: The prefix is taken, or holds what marks a reference (``:``, ``/``, ``.``).
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", prefix):
        raise RegistryError(f"{prefix!r} is no prefix for environments: use letters, digits, - and _")
    if prefix in _PREFIXES:
        raise RegistryError(f"the prefix {prefix!r} is taken: give another one")
    _PREFIXES[prefix] = reference


def register_with_gymnasium(*names: str) -> None:
    """Register environments with Gymnasium as ``turnwise/<name>-v0``, if it is imported.

    Args:
        *names: Registered names; none is all of them.
    """
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return
    for name in names or env_names():
        env_id = f"turnwise/{name}-v0"
        # Gymnasium allows fewer characters in a name; and a name that is there already keeps its entry.
        if _GYMNASIUM_NAME.fullmatch(name) and env_id not in gymnasium.registry:
            gymnasium.register(
                env_id, entry_point="turnwise.envs.gym.to_gymnasium:GymnasiumAdapter", kwargs={"env": name}
            )


def env_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_ENVS)


def env_prefixes() -> list[str]:
    """Return the registered prefixes, sorted."""
    return sorted(_PREFIXES)


def default_task_source(name: str, config: Mapping[str, Any]) -> str | None:
    """Return the source of an environment's own tasks in a configuration, or None. Raises RegistryError."""
    cls = env_class(name)
    return cls.default_tasks if cls.tasks_of is None else cls.tasks_of(config)


def make(name: str, /, **config: Any) -> Env:
    """Make an environment.

    Args:
        name: A registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        **config: Keyword arguments of its constructor, over the registered defaults.

    Raises:
        RegistryError: The environment is unknown (the message names close matches), or refuses this configuration.
    """
    entry = _entry(name)
    cls: Callable[..., Env] = _load(name, entry)
    merged = {**entry.config, **config}
    try:
        _check_arguments(cls, *merged)
    except TypeError as error:
        signature = _signature(cls)
        takes = [parameter for parameter in signature.parameters if parameter not in ("args", "kwargs")]
        hints = "".join(nearest(key, takes) for key in merged if key not in takes)
        raise RegistryError(
            f"environment {name!r} does not take {merged}: {error}{hints}; its configuration is {signature}"
        ) from error
    env = cls(**merged)
    if env.forks == "replay":
        env._maker = functools.partial(make, name, **config)
    return env


def env_class(name: str) -> type[Env]:
    """Return the class of an environment. Raises RegistryError as :func:`make`."""
    return _load(name, _entry(name))


def run_name(env: str) -> str:
    """Return the default name of a run of an environment: its class or registered name, as a folder's name."""
    short = env.rpartition(":")[2].lower()
    return "".join(letter if letter.isalnum() else "-" for letter in short).strip("-") or "run"


def _entry(name: str) -> _Entry:
    entry = _ENVS.get(name)
    if entry is not None:
        return entry
    prefix, colon, rest = name.partition(":")
    if colon and prefix in _PREFIXES:
        return _Entry(load_object(_PREFIXES[prefix], "environments")(prefix, rest), {})
    if ":" not in name and name.endswith(".py"):
        raise RegistryError(f"environment {name!r} names a file without a class: write {name}:Class")
    if ":" not in name:
        raise RegistryError(
            f"there is no environment {name!r}{nearest(name, _ENVS)}; registered are {', '.join(env_names())}; any "
            f"other is made by pkg.module:Class or path/to/file.py:Class, those of other frameworks by "
            f"{', '.join(f'{family}:NAME' for family in env_prefixes())}"
        )
    return _Entry(name, {})


@functools.lru_cache(maxsize=256)
def _check_arguments(cls: Callable[..., Env], *names: str) -> None:
    """Check that a class takes keyword arguments of these names, cached like the signature. Raises TypeError."""
    _signature(cls).bind(**dict.fromkeys(names))


@functools.lru_cache(maxsize=256)
def _signature(cls: Callable[..., Env]) -> inspect.Signature:
    """Return the signature of a class, cached: inspection costs as much as some turns of an episode."""
    return inspect.signature(cls)


def _load(name: str, entry: _Entry) -> type[Env]:
    if not isinstance(entry.entry_point, str):
        return entry.entry_point
    try:
        cls = load_object(entry.entry_point, "environment")
    except ConfigError as error:
        prefix, _, rest = entry.entry_point.partition(":")
        close = difflib.get_close_matches(prefix, _PREFIXES, n=1)
        hint = f"; of another framework it is {close[0]}:{rest}" if close and prefix not in sys.modules else ""
        raise RegistryError(f"{error}{hint}") from error
    if not (isinstance(cls, type) and issubclass(cls, Env)):
        raise RegistryError(f"environment {name!r} is {cls!r}: it must be a subclass of turnwise.Env")
    return cls
