"""What a logger is, and which there are."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from turnwise.config import ConfigReference
from turnwise.errors import RegistryError
from turnwise.plugins import load_object
from turnwise.trainer.algorithms.registry import Chosen, bind, find

LOGGERS: dict[str, str] = {
    "tensorboard": "turnwise.trainer.observe.loggers.tensorboard:TensorBoardLogger",
    "wandb": "turnwise.trainer.observe.loggers.wandb:WandbLogger",
    "trackio": "turnwise.trainer.observe.loggers.trackio:TrackioLogger",
    "mlflow": "turnwise.trainer.observe.loggers.mlflow:MLflowLogger",
}
"""References to loggers by the name that a configuration uses."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """What a logger is told of the run that it logs.

    Attributes:
        name: The run's.
        id: Tells it apart from others of its name; the processes of a resumed run have one.
        directory: Where the run writes.
        config: Its configuration, as JSON values.
        step: The step that this process goes on after. What was logged of later ones is logged again.
    """

    name: str
    id: str
    directory: Path
    config: Mapping[str, Any]
    step: int

    def settings(self) -> dict[str, str]:
        """Return the configuration without nesting: dotted key and value as text."""
        return dict(_flat(self.config, ""))


class Logger(ABC):
    """Takes the figures of a run to somewhere else.

    Its class is called with the :class:`LoggedRun`, and by keyword with what ``config`` says; that is checked against
    the annotations before work starts. One that raises when it is made keeps the run from starting. After that nothing
    it raises ends a run.
    """

    @classmethod  # noqa: B027 - most need nothing
    def check(cls) -> None:
        """See that what is needed can be imported. Nothing, unless a logger needs something.

        Raises:
            MissingExtraError: A package is not installed.
        """

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step. Called in a thread of this logger alone, in the order of the records.

        Args:
            step: The train step.
            figures: By name; those of training and of evaluations come in two calls.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """End: what was taken is on its way. Called once, in the same thread."""


def _named(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


class LoggerConfig(BaseModel):
    """One logger beside the console and ``metrics.jsonl``.

    Attributes:
        name: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``, or a class of your own as ``pkg.mod:Class``.
        config: Its options by name (docs/metrics.md).
    """

    model_config = ConfigDict(extra="forbid")

    name: ConfigReference
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        try:
            chosen_logger(self)
        except RegistryError as error:
            raise ValueError(str(error)) from error
        return self


LoggersConfig: TypeAlias = list[Annotated[LoggerConfig, BeforeValidator(_named)]]
"""``loggers`` of a configuration; a name alone is a logger without options."""


def find_logger(name: str) -> type[Logger]:
    """Return a logger's class by its name, or a user's own by a reference.

    Raises:
        RegistryError: There is none, or what the reference names is none.
    """
    found = find(name, LOGGERS, "loggers.name")
    cls = load_object(found, "logger") if isinstance(found, str) else found
    if not (isinstance(cls, type) and issubclass(cls, Logger)):
        raise RegistryError(
            f"logger {name!r} is {cls!r}: it must derive from turnwise.trainer.observe.loggers.core.Logger"
        )
    if inspect.isabstract(cls):
        raise RegistryError(f"logger {name!r} does not define {', '.join(sorted(cls.__abstractmethods__))}")
    return cls


def chosen_logger(config: LoggerConfig) -> Chosen:
    """Return a logger's class with its checked options.

    Raises:
        RegistryError: There is no such logger, or it does not take these options.
    """
    cls = find_logger(config.name)
    return bind(config.name, cls, config.config, key="loggers.config", arguments=("run",), data=())


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _flat(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, str(value)
