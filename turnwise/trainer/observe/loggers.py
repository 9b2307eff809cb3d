"""Where metrics go beside ``metrics.jsonl``: the contract of loggers, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turnwise.plugins import references
from turnwise.trainer.algorithms.registry import ClassRegistry, ConfiguredFunction, bind
from turnwise.trainer.config.policy import LoggerConfig


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run that a logger logs.

    Attributes:
        name: Its name.
        id: Unique id, shared by the processes of a resumed run.
        directory: Its directory.
        config: Its configuration, as JSON values.
        step: The step that this process resumes after; later steps are logged again.
    """

    name: str
    id: str
    directory: Path
    config: Mapping[str, Any]
    step: int

    def settings(self) -> dict[str, str]:
        """Return the configuration as dotted keys and string values."""
        return dict(_flat(self.config, ""))


class Logger(ABC):
    """Sends the metrics of a run to a backend.

    Constructed with the :class:`LoggedRun` and, by keyword, its validated ``config`` options. A constructor error keeps
    the run from starting; later errors never end a run.
    """

    @classmethod  # noqa: B027 - most need nothing
    def check(cls) -> None:
        """Check that required packages are installed; by default none.

        Raises:
            MissingExtraError: A package is not installed.
        """

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step; training and evaluations come in separate calls.

        Called in this logger's own thread, in the order of the records.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Flush and close. Called once, in the same thread."""


LOGGERS: Final = ClassRegistry(Logger, "logger", "loggers.name", dict(references("loggers")))
"""Loggers by the name that a configuration uses: those that plug in, and those that are registered."""

register_logger = LOGGERS.register
"""Registers a logger's class for ``loggers``, as a decorator."""


def chosen_logger(config: LoggerConfig) -> ConfiguredFunction:
    """Return a logger's class with its validated options.

    Raises:
        RegistryError: No such logger, or a wrong option.
    """
    cls = LOGGERS.find(config.name)
    return bind(config.name, cls, config.config, key="loggers.config", arguments=("run",), data=())


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, nested in value.items():
            yield from _flat(nested, f"{key}.{name}" if key else str(name))
    else:
        yield key, str(value)
