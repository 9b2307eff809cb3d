"""Training from Python: :class:`Trainer`, and datasets as task sources."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson
from pydantic import BaseModel
from rich.console import Console

from turnwise.agents.core import Agent
from turnwise.agents.registry import AgentMaker
from turnwise.append_file import private_directory, write_private
from turnwise.config import load_config
from turnwise.envs.core import Env
from turnwise.errors import ConfigError, TaskError, shown
from turnwise.plugins import reference_to
from turnwise.tasks.config import SourceConfig
from turnwise.tasks.core import Task
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.dry_run import DryRun, dry_run
from turnwise.trainer.run.run import TrainRun
from turnwise.trainer.run.train import TrainSummary, run_train, train
from turnwise.trainer.training import Algorithm, Training, as_algorithm, call_run

Dataset: TypeAlias = "str | Path | SourceConfig | Iterable[Task | Mapping[str, Any]] | Callable[..., Any]"
"""A source as ``tasks:`` takes it (text, a :class:`~turnwise.tasks.SourceConfig`, a list of either, which is a mix), a
function at the top of a module that returns or yields rows, or rows: Tasks or dicts, of a list, a generator or a
Hugging Face dataset."""

MOST_ROWS: Final = 1_000_000
"""More rows are not copied into a file: an iterable without an end would never let the run begin."""


def task_config(dataset: Dataset, home: Path, *, name: str, whole_rows: bool = False) -> Any:
    """Return the ``tasks`` configuration of a dataset.

    Args:
        dataset: The dataset.
        home: Directory for rows in memory, written as ``datasets/NAME-DIGEST.jsonl``.
        name: The dataset's name.
        whole_rows: Whether rows are passed whole to the agent; one without a ``prompt`` then has an empty one.

    Raises:
        TaskError: A row is no Task or mapping, or is not JSON-serialisable; the message names row and field. Or there
            are no rows, or more than a million.
        ConfigError: A function cannot be imported by another process.
    """
    if isinstance(dataset, (str, Path)):
        return str(dataset)
    if isinstance(dataset, SourceConfig) or (isinstance(dataset, Mapping) and "source" in dataset):
        return dataset
    if isinstance(dataset, Mapping):
        raise TaskError(
            f"the {name} dataset is a mapping of {', '.join(map(repr, dataset)) or 'nothing'}: give one of its parts "
            "(dataset['train']), or a source with its keys ({'source': ...})"
        )
    if isinstance(dataset, (list, tuple)) and _is_mix(dataset):
        return list(dataset)
    if callable(dataset):
        _callable_without_arguments(dataset, name)
        return reference_to(dataset, f"{name} dataset")
    lines = [_line(row, f"{name} dataset: row {number}", whole_rows) for number, row in _rows(dataset, name)]
    if not lines:
        raise TaskError(f"the {name} dataset holds no row")
    content = b"\n".join(lines) + b"\n"
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    file = home / "datasets" / f"{name}-{digest}.jsonl"
    if not file.exists():
        private_directory(file.parent)
        draft = file.with_suffix(".draft")
        write_private(draft, content)
        draft.rename(file)
    return str(file.absolute())


def _is_mix(listed: Sequence[Any]) -> bool:
    """Whether a list holds sources instead of rows."""
    return bool(listed) and all(
        isinstance(each, (str, Path, SourceConfig))
        or (isinstance(each, Mapping) and "source" in each and "prompt" not in each)
        for each in listed
    )


def _callable_without_arguments(function: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TaskError(
            f"the {name} dataset is a function that cannot be called without arguments ({error}): give its rows, or "
            "its reference with arguments, as pkg.module:function?n=200"
        ) from error


def _rows(dataset: Any, name: str) -> Iterator[tuple[int, Any]]:
    try:
        rows = iter(dataset)
    except TypeError:
        raise TaskError(
            f"the {name} dataset is {shown(dataset)}: give rows (a list, a generator, a Hugging Face dataset), a "
            "function that returns them, or a source as tasks: takes it"
        ) from None
    for number, row in enumerate(rows):
        if number == MOST_ROWS:
            raise TaskError(
                f"the {name} dataset has more than {MOST_ROWS:,} rows, or no end: give the function that yields them "
                "itself, or a file, so that it is streamed"
            )
        yield number, row


def _line(row: Any, where: str, whole_rows: bool) -> bytes:
    if isinstance(row, Task):
        record: Mapping[str, Any] = row.to_record()
    elif isinstance(row, Mapping):
        record = {**row, "prompt": ""} if whole_rows and row.get("prompt") is None else row
    else:
        remedy = " (of a table, give its rows: frame.to_dict('records'))" if isinstance(row, str) else ""
        raise TaskError(f"{where} is {shown(row)}: a row is a turnwise.Task or a dict{remedy}")
    try:
        return orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        field = next((key for key, value in record.items() if not _is_json(value)), None)
        named = f": field {field!r} is {shown(record[field])}" if field is not None else ""
        raise TaskError(f"{where} cannot be written as JSON ({error}){named}") from error


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return False
    return True


Config: TypeAlias = "TrainConfig | Mapping[str, Any] | str | Path | Sequence[str | Path]"
Named: TypeAlias = "str | type[Any] | Mapping[str, Any] | Any"

# Environment of agents that bring their own reward.
_OWN_REWARD: Final = "task"


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved arguments of :meth:`Trainer.fit`.

    Attributes:
        config: The configuration.
        algorithm: The algorithm.
    """

    config: TrainConfig
    algorithm: Algorithm

    async def run(self, run: TrainRun) -> None:
        """Run the algorithm on the parts of a run."""
        await call_run(self.algorithm.run, repr(self.algorithm), Training(run))


class Trainer:
    """Trains a policy from Python.

    Arguments override the configuration.

    Args:
        config: A :class:`~turnwise.trainer.config.train.TrainConfig`, its keys as a mapping, or YAML files.
        *overrides: ``key=value`` strings as on the command line.
        algorithm: Default algorithm of :meth:`fit`.
        agent: The agent: a registered name or reference, an ``Agent`` class, a ``@rollout`` function, or
            ``{"name": any of these, "config": {...}}``.
        env: The environment, in the same forms.
        model: Directory of the Hugging Face model to train.
        name: Name of the run, in ``runs/NAME``. By default that of the agent or environment.
        hooks: Subclasses of :class:`~turnwise.trainer.run.hooks.Hooks` or references to them; one, or a list.
        n_runners: Number of concurrent episodes (``rollout.concurrency``).
        console: Console of the display; by default standard error.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        config: Config | None = None,
        *overrides: str,
        algorithm: Any = None,
        agent: Named | None = None,
        env: Named | None = None,
        model: str | Path | None = None,
        name: str | None = None,
        n_runners: int | None = None,
        hooks: Named | Sequence[Named] | None = None,
        console: Console | None = None,
    ) -> None:
        self._config = config
        self._overrides = overrides
        self._algorithm = None if algorithm is None else as_algorithm(algorithm)
        self._agent, self._env = agent, env
        self._options: dict[str, Any] = {
            "policies.main.model.path": model,
            "name": name,
            "rollout.concurrency": n_runners,
        }
        if hooks is not None:
            listed = hooks if isinstance(hooks, (list, tuple)) else [hooks]
            self._options["hooks"] = [_plain(each, "hooks") for each in listed]
        self._console = console

    def fit(
        self,
        algorithm: Any = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        *,
        fresh: bool = False,
    ) -> TrainSummary:
        """Train until the budget is spent, resuming from the last checkpoint if there is one.

        Ctrl-C ends the run in order, with a checkpoint of the last finished step; the same call resumes it, and so does
        ``turnwise train runs/NAME/config.yaml`` (except for a custom algorithm object).

        Args:
            algorithm: A name (``"grpo"``, ``"gspo"``, ``"ppo"``), an ``AlgorithmConfig``, an object with
                ``async def run`` or an async function; by default the configured one. May also be an agent, as in
                Agent-Lightning.
            train_dataset: Tasks or dicts, a Hugging Face dataset, a generator, a function or a source as in ``tasks``;
                by default the configured one.
            val_dataset: Held-out tasks, in the same forms.
            fresh: Start anew, whatever the run directory holds.

        Raises:
            ConfigError: An argument is invalid, or an event loop is running (await :meth:`fit_async` then).
            TurnwiseError: The run cannot start or continue.
            KeyboardInterrupt: The run was interrupted; it can be resumed.
        """
        _check_no_loop()
        plan = self.plan(algorithm, train_dataset, val_dataset)
        return run_train(plan.config, fresh=fresh, console=self._console, loop=plan.run)

    async def fit_async(
        self,
        algorithm: Any = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        *,
        fresh: bool = False,
    ) -> TrainSummary:
        """Train as :meth:`fit` does, in the running event loop (a notebook, a service).

        When cancelled, the last finished step is checkpointed, and the same call resumes the run.

        Raises:
            TurnwiseError: The run cannot start or continue.
        """
        plan = self.plan(algorithm, train_dataset, val_dataset)
        return await train(plan.config, fresh=fresh, console=self._console, loop=plan.run)

    async def dry_run(
        self, algorithm: Any = None, train_dataset: Dataset | None = None, val_dataset: Dataset | None = None
    ) -> DryRun:
        """Check all inputs of :meth:`fit` without starting anything (``turnwise train --dry-run``).

        Raises:
            ConfigError: The arguments make no valid configuration.
        """
        return await dry_run(self.plan(algorithm, train_dataset, val_dataset).config)

    def plan(
        self, algorithm: Any = None, train_dataset: Dataset | None = None, val_dataset: Dataset | None = None
    ) -> Plan:
        """Resolve the arguments of :meth:`fit`; rows in memory are written to ``runs/datasets``.

        Raises:
            ConfigError: The arguments make no valid configuration.
            TaskError: A row of a dataset is invalid.
        """
        agent = self._agent
        if is_agent(algorithm):
            algorithm, agent = None, algorithm
        chosen = self._algorithm if algorithm is None else as_algorithm(algorithm)
        named = None if agent is None else _named(agent, "agent")
        env = None if self._env is None else _named(self._env, "environment")
        said = {
            **{key: value for key, value in self._options.items() if value is not None},
            **_spec("rollout.agent", named),
            **_spec("rollout.env", env),
            **({} if chosen is None else _algorithm_keys(chosen)),
        }
        defaults = self._defaults(named, env, chosen)
        # Where rows are written is known from the configuration; their files are not in it yet.
        unknown = {} if val_dataset is None else {"eval.tasks": "val"}
        first = self._load(defaults, {**said, **unknown})
        whole_rows = first.rollout.env.name == _OWN_REWARD
        for key, label, dataset in (("tasks", "train", train_dataset), ("eval.tasks", "val", val_dataset)):
            if dataset is not None:
                said[key] = task_config(dataset, first.runs, name=label, whole_rows=whole_rows)
        return Plan(self._load(defaults, said), Algorithm() if chosen is None else chosen)

    def _defaults(
        self, agent: dict[str, Any] | None, env: dict[str, Any] | None, algorithm: Algorithm | None
    ) -> dict[str, Any]:
        called = (agent or env or {"name": "run"})["name"]
        short = str(called).rpartition(":")[2].lower()
        name = "".join(letter if letter.isalnum() else "-" for letter in short).strip("-") or "run"
        below: dict[str, Any] = {"name": name}
        if agent is not None:
            below["rollout"] = {"env": {"name": _OWN_REWARD}}
        for key, value in ({} if algorithm is None else algorithm.sections).items():
            _put(below, key.split("."), _plain(value, key))
        return below

    def _load(self, defaults: Mapping[str, Any], said: Mapping[str, Any]) -> TrainConfig:
        overrides = [f"{key}={json.dumps(_plain(value, key))}" for key, value in said.items()]
        config, files = self._config, None
        if isinstance(config, TrainConfig):
            # It says all there is to say: where it has no section, it does not forbid one.
            config = _without_gaps(config.model_dump(), defaults)
        if isinstance(config, Mapping):
            defaults = _merged(defaults, config)
        else:
            files = config
        return load_config(TrainConfig, files, [*self._overrides, *overrides], defaults)


def is_agent(given: Any) -> bool:
    """Whether the first argument of ``fit`` is an agent."""
    return (isinstance(given, (Agent, AgentMaker)) and not isinstance(given, Algorithm)) or (
        isinstance(given, type) and issubclass(given, Agent)
    )


def _named(given: Named, what: str) -> dict[str, Any]:
    """Return name and configuration of an environment or agent in any form."""
    config: dict[str, Any] = {}
    if isinstance(given, Mapping):
        unknown = sorted(given.keys() - {"name", "config"})
        if unknown or "name" not in given:
            raise ConfigError(f"{what} {shown(given)}: a mapping holds name and, optionally, config")
        given, config = given["name"], dict(given.get("config") or {})
    if isinstance(given, str):
        return {"name": given, "config": config}
    if isinstance(given, (Agent, Env)):
        return {"name": reference_to(_class_of(given, what), what), "config": config}
    return {"name": reference_to(given, what), "config": config}


def _class_of(given: Agent | Env, what: str) -> type[Any]:
    """Return the class of an object that can be recreated from it."""
    cls = type(given)
    try:
        same = vars(cls()) == vars(given)
    except TypeError:
        same = False
    if not same:
        raise ConfigError(
            f"{what} {cls.__qualname__} is an object with state, and the run creates its own instance: give "
            f'{{"name": {cls.__qualname__}, "config": {{...}}}} with the arguments of its constructor'
        )
    return cls


def _spec(key: str, named: dict[str, Any] | None) -> dict[str, Any]:
    if named is None:
        return {}
    return {f"{key}.name": named["name"], **({f"{key}.config": named["config"]} if named["config"] else {})}


def _algorithm_keys(algorithm: Algorithm) -> dict[str, Any]:
    """Return the keys of an algorithm, with other formulas' keys reset to their defaults."""
    fields = AlgorithmConfig.model_fields
    forgotten = {name: fields[name].get_default(call_default_factory=True) for name in algorithm.replaces}
    return {f"algorithm.{name}": value for name, value in {**forgotten, **algorithm.settings}.items()}


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(), key)
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, key) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Path):
        return str(value)
    return reference_to(value, key)


def _put(below: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        below = below.setdefault(key, {})
    below[keys[-1]] = value


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _without_gaps(above: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Drop each None of ``above`` that would hide a section of ``below``."""
    kept: dict[str, Any] = {}
    for key, value in above.items():
        section = below.get(key)
        if isinstance(section, Mapping) and isinstance(value, Mapping):
            kept[key] = _without_gaps(value, section)
        elif value is not None or not isinstance(section, Mapping):
            kept[key] = value
    return kept


def _check_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigError(
        "Trainer.fit() was called while an event loop runs. In a notebook or an async function write 'await "
        'trainer.fit_async(...)\'; in a file that a run loads, put the call under if __name__ == "__main__"'
    )
