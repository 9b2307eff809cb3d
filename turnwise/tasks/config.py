"""The configuration of task sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from turnwise.config import ConfigReference, ConfigSource
from turnwise.tasks.formats import row_format_references

PositiveInt: TypeAlias = Annotated[int, Field(gt=0)]
_FORMS = "a file of tasks, or pkg.module:function"


def _said(source: str) -> str:
    if not source:
        raise ValueError(_FORMS)
    return source


_Source: TypeAlias = Annotated[ConfigSource, AfterValidator(_said)]


class SpecRow(BaseModel):
    """The default environment or agent of a source's tasks.

    Attributes:
        name: A registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``; None is the run's.
        config: Keyword arguments of its constructor, merged over the run's.
    """

    model_config = ConfigDict(extra="forbid")

    name: ConfigReference | None = None
    config: dict[str, Any] = Field(default_factory=dict)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, (str, Path)) else value


class SourceConfig(BaseModel):
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
        stream: Read tasks as they are needed, holding ``shuffle_buffer`` of them; by default above 100,000 tasks.
        shuffle_buffer: Size of the buffer from which a streamed source is shuffled.
    """

    model_config = ConfigDict(extra="forbid")

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
    shuffle_buffer: PositiveInt = 10_000

    @field_validator("env", "agent", mode="before")
    @classmethod
    def _a_name_is_enough(cls, value: Any) -> Any:
        return _named(value)

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str) -> str:
        known = ("turnwise", "verl", *row_format_references())
        if name not in known:
            raise ValueError(f"one of {', '.join(known)} (not {name!r})")
        return name

    @field_validator("columns")
    @classmethod
    def _targets_are_fields(cls, columns: dict[str, str]) -> dict[str, str]:
        wrong = [name for name in columns if name not in ("id", "prompt", "env", "agent", "data")]
        wrong = [name for name in wrong if not (name.startswith("data.") and all(name.split(".")))]
        if wrong:
            raise ValueError(f"fields of a task: id, prompt, env, agent, data, data.NAME (not {', '.join(wrong)})")
        return columns

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        chosen = [name for name, given in self._ways().items() if given]
        if len(chosen) > 1:
            raise ValueError(f"one way to read a row (here: {', '.join(chosen)})")
        if (self.split is None) != (self.test_fraction is None):
            raise ValueError(
                "split and test_fraction together (a split of the dataset's own is named in source: folder:train)"
            )
        return self

    def _ways(self) -> dict[str, bool]:
        form = f"format: {self.format}"
        return {form: self.format != "turnwise", "columns": bool(self.columns), "map": self.map is not None}


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
    listed = [tasks] if isinstance(tasks, (str, SourceConfig)) else list(tasks)
    return [each if isinstance(each, SourceConfig) else SourceConfig(source=each) for each in listed]


Share = Annotated[float, Field(ge=0, le=1)]


# Of a task that was taken, and of which nothing is known yet: neither easy nor hard.
_UNKNOWN = 0.5


_TOLERANCE = 1e-9


def pools_of(rates: NDArray[np.float64], buckets: Sequence[float]) -> NDArray[np.intp]:
    """Return the pool index of each rate; an unknown rate (nan) counts as 0.5."""
    return np.searchsorted(buckets[1:-1], np.where(np.isnan(rates), _UNKNOWN, rates), side="right")


class CurriculumConfig(BaseModel):
    """Draws tasks from difficulty pools by their running success rate.

    Attributes:
        buckets: Bounds of the pools, from 0 to 1; a rate equal to a bound belongs to the pool above it.
        weights: Relative frequency of each pool.
        floor: Minimum share of every non-empty pool.
        decay: Exponential decay: rate = decay * rate + (1 - decay) * successes of the group.
        success_reward: Minimum reward of a success.
        by: Field of a task's ``data`` whose values have a rate each, such as ``level``; None is a rate for each task.
    """

    model_config = ConfigDict(extra="forbid")

    buckets: tuple[Share, ...] = (0.0, 0.2, 0.8, 1.0)
    weights: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = (1.0, 4.0, 1.0)
    floor: Share = 0.05
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    success_reward: float = 1.0
    by: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        bounds = self.buckets
        if len(bounds) < 2 or (bounds[0], bounds[-1]) != (0.0, 1.0) or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"buckets is {list(bounds)}: bounds must rise from 0 to 1, such as [0.0, 0.2, 0.8, 1.0]")
        if len(self.weights) != len(bounds) - 1 or not any(self.weights):
            raise ValueError(
                f"weights is {list(self.weights)}: give one number for each of {len(bounds) - 1} pools, not all 0"
            )
        if self.floor * len(self.weights) > 1:
            raise ValueError(f"floor is {self.floor:g}, and {len(self.weights)} pools have more than 1 then: lower it")
        return self

    @property
    def pools(self) -> list[str]:
        """Names of the pools in metrics."""
        return [f"{low:g}-{high:g}" for low, high in zip(self.buckets, self.buckets[1:], strict=False)]

    def rate(self, before: float, rewards: Sequence[float]) -> float:
        """Return a task's running success rate after a group; ``before`` is nan for the first one."""
        found = sum(each >= self.success_reward - _TOLERANCE for each in rewards) / len(rewards)
        return found if np.isnan(before) else self.decay * before + (1 - self.decay) * found

    def figures(self, rates: Iterable[float]) -> dict[str, float]:
        """Return the mean success rate and the share of tasks in each pool, as metrics."""
        known = np.array(list(rates), np.float64)
        if not len(known):
            return {}
        held = np.bincount(pools_of(known, self.buckets), minlength=len(self.weights)) / len(known)
        shares = {f"curriculum/share_{name}": float(share) for name, share in zip(self.pools, held, strict=True)}
        return {"curriculum/rate": float(known.mean()), "curriculum/tasks": float(len(known)), **shares}
