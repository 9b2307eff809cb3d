"""The inference engines by name, and the factory that makes their replicas."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from turnwise.errors import ConfigError, RegistryError
from turnwise.inference.config import InferenceConfig
from turnwise.model.core import Replica
from turnwise.plugins import load_object

R = TypeVar("R", bound=type[Replica])

ENGINES: dict[str, type[Replica] | str] = {
    "builtin": "turnwise.inference.builtin:BuiltinReplica",
    "vllm": "turnwise.inference.vllm:VLLMReplica",
}
"""Replicas by the name that ``inference.engine`` uses: classes, or references to them."""

_log = logging.getLogger(__name__)


def register_engine(name: str) -> Callable[[R], R]:
    """Register a replica's class for ``inference.engine``. Raises RegistryError."""

    def register(cls: R) -> R:
        if not issubclass(cls, Replica):
            raise RegistryError(f"inference engine {name!r}: {cls!r} does not derive from Replica")
        held = ENGINES.setdefault(name, cls)
        if held is not cls and held != f"{cls.__module__}:{cls.__qualname__}":
            raise RegistryError(f"inference engine {name!r} is taken by {held!r}: choose another name")
        ENGINES[name] = cls
        return cls

    return register


def find_engine(name: str) -> type[Replica]:
    """Return the class of an engine, given its name or a reference. Raises ConfigError."""
    found: Any = ENGINES.get(name, name)
    if isinstance(found, str):
        if ":" not in found and "." not in found:
            close = difflib.get_close_matches(found, ENGINES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            known = ", ".join(sorted(ENGINES))
            raise ConfigError(f"inference.engine is {found!r}{hint} Known: {known}, or a class as pkg.mod:Class")
        found = load_object(found, "inference engine")
    if not (isinstance(found, type) and issubclass(found, Replica)):
        raise ConfigError(f"inference.engine is {name!r}, which is {found!r}, not a Replica")
    return found


async def check_engine(model: Path, config: InferenceConfig) -> None:
    """Check the configured engine before its servers are started; log its warnings. Raises ConfigError."""
    for warning in await find_engine(config.engine).check(model, config):
        _log.warning("%s", warning)


def make_replica(
    model: str | Path,
    config: InferenceConfig,
    *,
    log_file: Path,
    name: str | None = None,
    weight_version: int = 0,
    number: int = 0,
    url: str | None = None,
) -> Replica:
    """Make a replica of the configured engine.

    Args:
        model: Checkpoint directory.
        config: Server settings.
        log_file: Server log.
        name: Served name; None for the directory's.
        weight_version: Version of the checkpoint's weights.
        number: Place among the replicas of a set.
        url: A running server instead of a launched one.

    Raises:
        ConfigError: The engine is unknown, or its class takes other arguments.
    """
    engine: Any = find_engine(config.engine)
    try:
        made: Replica = engine(
            model, config, name=name, weight_version=weight_version, log_file=log_file, number=number, url=url
        )
    except TypeError as error:
        raise ConfigError(
            f"inference.engine is {config.engine!r}, whose class cannot be constructed: {error}; it takes the "
            "arguments that turnwise.model.core.Replica describes"
        ) from error
    return made


def make_replicas(model: Path, config: InferenceConfig, *, logs: Path) -> list[Replica]:
    """Make the configured replicas, with a log file each in ``logs``. Raises ConfigError; see :func:`make_replica`."""
    urls: list[str] | list[None] = config.urls or [None] * config.replicas
    return [
        make_replica(model, config, log_file=logs / f"server-{number}.log", number=number, url=url)
        for number, url in enumerate(urls)
    ]
