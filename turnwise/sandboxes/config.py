"""The configuration section of sandboxes, and the backend registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from turnwise.config import ConfigReference, Section, report_problems
from turnwise.errors import ConfigError
from turnwise.plugins import check_contract, find_class, load_object, references, registering
from turnwise.sandboxes.core import SandboxBackend, SandboxLimits, SandboxSpec

B = TypeVar("B", bound=type[SandboxBackend])
M = TypeVar("M", bound=BaseModel)

BACKENDS: dict[str, Any] = {
    "local": "turnwise.sandboxes.local:LocalBackend",
    "docker": "turnwise.sandboxes.docker:DockerBackend",
    "e2b": "turnwise.sandboxes.e2b:E2BBackend",
    **references("sandboxes"),
}
"""Backends by the name that a configuration uses: classes, or references to them."""

_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def _parse_size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", value.lower())
    if match is None:
        raise ValueError(f"{value!r} is not a size: write bytes, or a number with k, m, g or t, such as 512m")
    return int(float(match[1]) * _UNITS[match[2]])


Bytes = Annotated[int, BeforeValidator(_parse_size), Field(gt=0)]


class LimitsConfig(Section):
    """Resource limits that override the environment's.

    Attributes:
        memory: Total memory in bytes; ``512m`` and ``2g`` are accepted.
        pids: Concurrent processes and threads.
        cpus: Processor time per second, in processors.
        disk: Bytes that may be written.
        network: Whether the network is accessible.
    """

    memory: Bytes | None = None
    pids: Annotated[int, Field(gt=0)] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    disk: Bytes | None = None
    network: bool | None = None

    def override(self, limits: SandboxLimits) -> SandboxLimits:
        """Return limits overridden by those that are set here."""
        values: dict[str, Any] = {
            "memory": self.memory,
            "pids": self.pids,
            "cpus": self.cpus,
            "disk": self.disk,
            "network": self.network,
        }
        return replace(limits, **{name: value for name, value in values.items() if value is not None})


class SandboxConfig(Section):
    """The sandbox backend and its bounds.

    Attributes:
        name: The backend: ``local``, ``docker``, ``e2b``, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        config: Keyword arguments of its constructor; null for none.
        limits: Limits that override the environment's.
        max_starts: Maximum number of concurrent starts.
        prewarm: Number of sandboxes started ahead, of the most recently requested spec.
    """

    name: ConfigReference = "local"
    config: Annotated[dict[str, Any], BeforeValidator(lambda options: {} if options is None else options)] = Field(
        default_factory=dict
    )
    limits: LimitsConfig = LimitsConfig()
    max_starts: Annotated[int, Field(gt=0)] = 8
    prewarm: Annotated[int, Field(ge=0)] = 0

    def apply(self, spec: SandboxSpec) -> SandboxSpec:
        """Return a spec with the configured limits."""
        return replace(spec, limits=self.limits.override(spec.limits))


def register_backend(name: str) -> Callable[[B], B]:
    """Register a backend class under a name. Raises RegistryError."""
    check = partial(check_contract, SandboxBackend, f"sandbox backend {name!r}")
    return registering(name, BACKENDS, "sandbox backend", check)


def read_options(model: type[M], backend: str, options: Mapping[str, Any]) -> M:
    """Validate the options of a backend. Raises ConfigError."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        problems = report_problems(model, options, {}, error.errors(include_url=False))
        raise ConfigError(f"sandbox.config of {backend!r}: {problems}") from error


def open_backend(config: SandboxConfig) -> SandboxBackend:
    """Create the configured backend; ConfigError if it is unknown, misconfigured or lacks an extra."""
    backend_class: Any = find_class(config.name, BACKENDS, "sandbox.name")
    if isinstance(backend_class, str):
        backend_class = load_object(backend_class, "sandbox backend")
    if not (isinstance(backend_class, type) and issubclass(backend_class, SandboxBackend)):
        raise ConfigError(f"sandbox.name is {config.name!r}, which is {backend_class!r}, not a SandboxBackend")
    try:
        return backend_class(**config.config)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"sandbox.config of {config.name!r}: {error}") from error
