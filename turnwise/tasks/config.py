"""The configuration of task sources."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from turnwise.config import ConfigReference, ConfigSource, Section
from turnwise.tasks.formats import row_format_references

PositiveInt: TypeAlias = Annotated[int, Field(gt=0)]
_FORMS = "a file of tasks, or pkg.module:function"


def _check_source(source: str) -> str:
    if not source:
        raise ValueError(_FORMS)
    return source


_Source: TypeAlias = Annotated[ConfigSource, AfterValidator(_check_source)]


class SpecRow(Section):
    """The default environment or agent of a source's tasks.

    Attributes:
        name: A registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``; None is the run's.
        config: Keyword arguments of its constructor, merged over the run's.
    """

    name: ConfigReference | None = None
    config: dict[str, Any] = Field(default_factory=dict)


class SourceConfig(Section):
    """One source of tasks.

    Attributes:
        source: A ``.jsonl`` or ``.parquet`` file, a folder with ``:split``, ``hf://owner/name:split``, or
            ``pkg.module:function?key=value``.
        name: Name in metrics; by default the file's or function's.
        weight: Relative share of draws in a mix of sources.
        format: ``turnwise`` (rows have the columns of a task), ``verl`` (the columns that verl's datasets have), or a
            published dataset: ``gsm8k``, ``humaneval``, ``swe-bench`` and others (docs/tasks-and-rewards.md).
        columns: Field of a task by column: ``{prompt: question, data.answer: answer}``.
        map: ``pkg.module:function`` from a row to a task (or its columns), or to None to drop the row.
        env: Environment of rows that name none: a name, or ``{name, config}``.
        agent: The same for the agent.
        split: ``train`` or ``test`` part of the rows, split by task id so that no row ever changes parts.
        test_fraction: Share of the rows that are ``test`` where ``split`` is given.
        id_prefix: Prefix of task ids, to keep the sources of a mix apart.
        limit: Maximum number of tasks.
        stream: Read tasks as they are needed, shuffled through a buffer of 10,000; by default above 100,000 tasks.
    """

    source: _Source = Field(description=_FORMS)
    name: Annotated[str, Field(pattern=r"^[^/\s]+$")] | None = None
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    format: str = "turnwise"
    columns: dict[str, str] = Field(default_factory=dict)
    map: ConfigReference | None = None
    env: SpecRow = SpecRow()
    agent: SpecRow = SpecRow()
    split: Literal["train", "test"] | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    id_prefix: str = ""
    limit: PositiveInt | None = None
    stream: bool | None = None

    @field_validator("env", "agent", mode="before")
    @classmethod
    def _accept_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, (str, Path)) else value

    @field_validator("format")
    @classmethod
    def _check_format(cls, name: str) -> str:
        names = ("turnwise", "verl", *row_format_references())
        if name not in names:
            raise ValueError(f"one of {', '.join(names)} (not {name!r})")
        return name

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = [name for name in columns if name not in ("id", "prompt", "env", "agent", "data")]
        unknown = [name for name in unknown if not (name.startswith("data.") and all(name.split(".")))]
        if unknown:
            raise ValueError(f"fields of a task: id, prompt, env, agent, data, data.NAME (not {', '.join(unknown)})")
        return columns

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        form = f"format: {self.format}"
        keys = {form: self.format != "turnwise", "columns": bool(self.columns), "map": self.map is not None}
        mappings = [name for name, is_set in keys.items() if is_set]
        if len(mappings) > 1:
            raise ValueError(f"one mapping of rows (here: {', '.join(mappings)})")
        if (self.split is None) != (self.test_fraction is None):
            raise ValueError(
                "split and test_fraction together (a split that the dataset has is named in source: folder:train)"
            )
        return self


def _form(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "list"
    return "section" if isinstance(value, (dict, SourceConfig)) else "text"


_One: TypeAlias = Annotated[
    Annotated[_Source, Tag("text")] | Annotated[SourceConfig, Tag("section")], Discriminator(_form)
]
TasksConfig: TypeAlias = Annotated[
    Annotated[_Source, Tag("text")]
    | Annotated[SourceConfig, Tag("section")]
    | Annotated[list[_One], Field(min_length=1), Tag("list")],
    Discriminator(_form),
]
"""What ``tasks:`` takes: a source as text, one with its keys, or a list of either, which is a mix."""


Sources: TypeAlias = "str | SourceConfig | Sequence[str | SourceConfig]"


def sources_of(tasks: Sources) -> list[SourceConfig]:
    """Normalise ``tasks:`` to a list of sources."""
    sources = [tasks] if isinstance(tasks, (str, SourceConfig)) else list(tasks)
    return [source if isinstance(source, SourceConfig) else SourceConfig(source=source) for source in sources]


POOL_BOUNDS: Final = (0.0, 0.2, 0.8, 1.0)
"""Bounds of the pools (hard, learnable, easy) by success rate; a rate equal to a bound is in the pool above it."""
POOL_FLOOR: Final = 0.05
"""Minimum share of every pool that holds a task."""

# The rate of a task that was taken, and whose rewards are not known yet: neither easy nor hard.
_UNKNOWN_RATE = 0.5
# How much of its previous rate a task keeps when a new group arrives.
_DECAY = 0.5
_TOLERANCE = 1e-9


def pools_of(rates: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the pool index of each rate; an unknown rate (nan) counts as 0.5."""
    return np.searchsorted(POOL_BOUNDS[1:-1], np.where(np.isnan(rates), _UNKNOWN_RATE, rates), side="right")


class CurriculumConfig(Section):
    """Draws tasks from three pools (hard, learnable, easy) by their running success rate.

    Attributes:
        weights: Relative frequency of each pool.
        success_reward: Minimum reward of a success.
        by: Field of a task's ``data`` whose values have a rate each, such as ``level``; None is a rate for each task.
    """

    weights: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = (1.0, 4.0, 1.0)
    success_reward: float = 1.0
    by: Annotated[str, Field(min_length=1)] | None = None

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: tuple[float, ...]) -> tuple[float, ...]:
        pools = len(POOL_BOUNDS) - 1
        if len(weights) != pools or not any(weights):
            raise ValueError(f"one number for each of {pools} pools, not all 0 (not {list(weights)})")
        return weights

    def rate(self, previous: float, rewards: Sequence[float]) -> float:
        """Return a task's running success rate after a group; ``previous`` is nan for the first one."""
        success = sum(reward >= self.success_reward - _TOLERANCE for reward in rewards) / len(rewards)
        return success if np.isnan(previous) else _DECAY * previous + (1 - _DECAY) * success

    def figures(self, rates: Iterable[float]) -> dict[str, float]:
        """Return the mean success rate and the share of tasks in each pool, as metrics."""
        all_rates = np.array(list(rates), np.float64)
        if not len(all_rates):
            return {}
        names = [f"{low:g}-{high:g}" for low, high in itertools.pairwise(POOL_BOUNDS)]
        pool_shares = np.bincount(pools_of(all_rates), minlength=len(names)) / len(all_rates)
        shares = {f"curriculum/share_{name}": float(share) for name, share in zip(names, pool_shares, strict=True)}
        return {"curriculum/rate": float(all_rates.mean()), "curriculum/tasks": float(len(all_rates)), **shares}
