"""The configuration section of sandboxes, and the backend registry."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from turnwise.config import ConfigReference
from turnwise.errors import ConfigError, RegistryError
from turnwise.plugins import load_object, references
from turnwise.sandboxes.core import SandboxBackend, SandboxLimits, SandboxSpec

B = TypeVar("B", bound=type[SandboxBackend])

BACKENDS: dict[str, type[SandboxBackend] | str] = {
    "local": "turnwise.sandboxes.local:LocalBackend",
    "docker": "turnwise.sandboxes.docker:DockerBackend",
    "e2b": "turnwise.sandboxes.e2b:E2BBackend",
    **references("sandboxes"),
}
"""Backends by the name that a configuration uses: classes, or references to them."""

_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", value.lower())
    if found is None:
        raise ValueError(f"{value!r} is not a size: write bytes, or a number with k, m, g or t, such as 512m")
    return int(float(found[1]) * _UNITS[found[2]])


Bytes = Annotated[int, BeforeValidator(_size), Field(gt=0)]


class LimitsConfig(BaseModel):
    """Resource limits that override the environment's.

    Attributes:
        memory: Total memory in bytes; ``512m`` and ``2g`` are accepted.
        pids: Concurrent processes and threads.
        cpus: Processor time per second, in processors.
        cpu_seconds: Processor seconds of a single process.
        disk: Bytes that may be written.
        file_size: Bytes of a single file.
        open_files: Open files of a single process.
        network: Whether the network is accessible.
    """

    model_config = ConfigDict(extra="forbid")

    memory: Bytes | None = None
    pids: Annotated[int, Field(gt=0)] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    cpu_seconds: Annotated[float, Field(gt=0)] | None = None
    disk: Bytes | None = None
    file_size: Bytes | None = None
    open_files: Annotated[int, Field(gt=0)] | None = None
    network: bool | None = None

    def over(self, limits: SandboxLimits) -> SandboxLimits:
        """Return limits overridden by those that are set here."""
        given = {
            "memory": self.memory,
            "pids": self.pids,
            "cpus": self.cpus,
            "cpu_seconds": self.cpu_seconds,
            "disk": self.disk,
            "file_size": self.file_size,
            "open_files": self.open_files,
            "network": self.network,
        }
        known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(limits, **known)


class SandboxConfig(BaseModel):
    """The sandbox backend and its bounds.

    Attributes:
        name: The backend: ``local``, ``docker``, ``e2b``, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        config: Keyword arguments of its constructor; null for none.
        limits: Limits that override the environment's.
        max_starts: Maximum number of concurrent starts.
        start_retries: Retries of a failed start.
        prewarm: Number of sandboxes started ahead, of the most recently requested spec.
    """

    model_config = ConfigDict(extra="forbid")

    name: ConfigReference = "local"
    config: Annotated[dict[str, Any], BeforeValidator(lambda given: {} if given is None else given)] = Field(
        default_factory=dict
    )
    limits: LimitsConfig = LimitsConfig()
    max_starts: Annotated[int, Field(gt=0)] = 8
    start_retries: Annotated[int, Field(ge=0)] = 2
    prewarm: Annotated[int, Field(ge=0)] = 0

    def apply(self, spec: SandboxSpec) -> SandboxSpec:
        """Return a spec with the configured limits."""
        return replace(spec, limits=self.limits.over(spec.limits))


def register_backend(name: str) -> Callable[[B], B]:
    """Register a backend class under a name. Raises RegistryError."""

    def register(cls: B) -> B:
        if not issubclass(cls, SandboxBackend):
            raise RegistryError(f"sandbox backend {name!r}: {cls!r} does not derive from SandboxBackend")
        held = BACKENDS.setdefault(name, cls)
        if held is not cls and held != f"{cls.__module__}:{cls.__qualname__}":
            raise RegistryError(f"sandbox backend {name!r} is taken by {held!r}: choose another name")
        BACKENDS[name] = cls
        return cls

    return register


def open_backend(config: SandboxConfig) -> SandboxBackend:
    """Create the configured backend; ConfigError if it is unknown, misconfigured or lacks an extra."""
    found = BACKENDS.get(config.name, config.name)
    if isinstance(found, str):
        if ":" not in found:
            close = difflib.get_close_matches(found, BACKENDS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            known = ", ".join(sorted(BACKENDS))
            raise ConfigError(f"sandbox.name is {found!r}{hint} Known: {known}, or your own class as pkg.mod:Class")
        found = load_object(found, "sandbox backend")
    if not (isinstance(found, type) and issubclass(found, SandboxBackend)):
        raise ConfigError(f"sandbox.name is {config.name!r}, which is {found!r}, not a SandboxBackend")
    try:
        return found(**config.config)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"sandbox.config of {config.name!r}: {error}") from error
