"""Training from Python: :class:`Trainer`."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pydantic import BaseModel
from rich.console import Console

from turnwise.agents.core import Agent
from turnwise.agents.registry import AgentMaker
from turnwise.config import load_config, merge_sections
from turnwise.envs.core import Env
from turnwise.errors import ConfigError, nearest, shown
from turnwise.plugins import reference_to
from turnwise.trainer.algorithms.advantages import ADVANTAGES
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.gae import CRITIC_ADVANTAGES
from turnwise.trainer.algorithms.losses import LOSSES
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.datasets import Dataset, task_config
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.run.dry_run import DryRun, dry_run
from turnwise.trainer.train import TrainSummary, run_train, train
from turnwise.trainer.training import Training, TrainingLoop

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun

Config: TypeAlias = "TrainConfig | Mapping[str, Any] | str | Path | Sequence[str | Path]"
NameOrObject: TypeAlias = "str | type[Any] | Mapping[str, Any] | Any"

AlgorithmKeys: TypeAlias = "str | AlgorithmConfig | Mapping[str, Any]"
"""A name, or keys of the ``algorithm`` section; a function may stand where a key names one."""

FORMULA_KEYS: Final = (
    "advantage", "advantage_options", "drop_zero_variance", "loss", "loss_options", "loss_aggregation", "loss_scale",
)  # fmt: skip
"""Keys of ``algorithm`` that a name sets anew: those of another formula would be wrong."""

_PPO: Final = {"advantage": "gae", "drop_zero_variance": False}
_FORMULAS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ppo": _PPO,
    "gae": _PPO,
    "dr_grpo": {"advantage": "dr_grpo", "loss_aggregation": "seq_mean_token_sum_norm"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", "drop_zero_variance": False},
    "gpg": {"advantage": "gpg", "loss": "gpg", "drop_zero_variance": False},
}
"""The names whose formula is more than one key."""

# Environment of agents that bring their own reward.
_OWN_REWARD: Final = "task"


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The resolved arguments of :meth:`Trainer.fit`.

    Attributes:
        config: The configuration.
        loop: The custom training loop; None is that of ``mode``.
    """

    config: TrainConfig
    loop: TrainingLoop | None = None

    async def run(self, run: TrainRun) -> None:
        """Train an opened run until it should end."""
        if self.loop is None:
            await train_as_configured(run)
        else:
            await self.loop(Training(run))


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
        agent: NameOrObject | None = None,
        env: NameOrObject | None = None,
        model: str | Path | None = None,
        name: str | None = None,
        n_runners: int | None = None,
        hooks: NameOrObject | Sequence[NameOrObject] | None = None,
        console: Console | None = None,
    ) -> None:
        self._config = config
        self._overrides = overrides
        self._algorithm = algorithm
        self._agent, self._env = agent, env
        self._options: dict[str, Any] = {
            "policies.main.model.path": model,
            "name": name,
            "rollout.concurrency": n_runners,
        }
        if hooks is not None:
            references = hooks if isinstance(hooks, (list, tuple)) else [hooks]
            self._options["hooks"] = [_as_json(reference, "hooks") for reference in references]
        self._console = console
        self._load({}, {}, incomplete=True)

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
        ``turnwise train runs/NAME/config.yaml`` (except for a custom training loop).

        Args:
            algorithm: A name (``"grpo"``, ``"gspo"``, ``"ppo"``), an ``AlgorithmConfig`` or a mapping of its keys; or a
                training loop, an async function ``run(training)`` (:class:`~turnwise.trainer.training.Training`). By
                default as configured. May also be an agent.
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
    ) -> TrainingPlan:
        """Resolve the arguments of :meth:`fit`; rows in memory are written to ``runs/datasets``.

        Raises:
            ConfigError: The arguments make no valid configuration.
            TaskError: A row of a dataset is invalid.
        """
        agent = self._agent
        if is_agent(algorithm):
            algorithm, agent = None, algorithm
        algorithm = self._algorithm if algorithm is None else algorithm
        loop = _training_loop(algorithm)
        keys = {} if algorithm is None or loop is not None else algorithm_keys(algorithm)
        agent_spec = None if agent is None else _spec(agent, "agent")
        env_spec = None if self._env is None else _spec(self._env, "environment")
        overrides = {
            **{key: value for key, value in self._options.items() if value is not None},
            **_spec_overrides("rollout.agent", agent_spec),
            **_spec_overrides("rollout.env", env_spec),
            **{f"algorithm.{name}": value for name, value in keys.items()},
        }
        defaults = self._defaults(agent_spec, env_spec, critic=needs_critic(keys))
        # Where rows are written is known from the configuration; their files are not in it yet.
        pending = {} if val_dataset is None else {"eval.tasks": "val"}
        first = self._load(defaults, {**overrides, **pending})
        whole_rows = first.rollout.env.name == _OWN_REWARD
        for key, label, dataset in (("tasks", "train", train_dataset), ("eval.tasks", "val", val_dataset)):
            if dataset is not None:
                overrides[key] = task_config(dataset, first.runs, name=label, whole_rows=whole_rows)
        return TrainingPlan(self._load(defaults, overrides), loop)

    def _defaults(self, agent: dict[str, Any] | None, env: dict[str, Any] | None, *, critic: bool) -> dict[str, Any]:
        reference = str((agent or env or {"name": "run"})["name"])
        short = reference.rpartition(":")[2].lower()
        name = "".join(letter if letter.isalnum() else "-" for letter in short).strip("-") or "run"
        defaults: dict[str, Any] = {"name": name}
        if agent is not None:
            defaults["rollout"] = {"env": {"name": _OWN_REWARD}}
        if critic:
            defaults["policies"] = {"main": {"critic": {}}}
        return defaults

    def _load(self, defaults: Mapping[str, Any], keys: Mapping[str, Any], *, incomplete: bool = False) -> TrainConfig:
        overrides = [f"{key}={json.dumps(_as_json(value, key))}" for key, value in keys.items()]
        config, files = self._config, None
        if isinstance(config, TrainConfig):
            # A dumped configuration holds every key: a section that is None in it is not thereby forbidden.
            config = _without_gaps(config.model_dump(), defaults)
        if isinstance(config, Mapping):
            defaults = merge_sections(defaults, config)
        else:
            files = config
        return load_config(TrainConfig, files, [*self._overrides, *overrides], defaults, incomplete=incomplete)


def is_agent(algorithm: Any) -> bool:
    """Whether the first argument of ``fit`` is an agent."""
    return isinstance(algorithm, (Agent, AgentMaker)) or (isinstance(algorithm, type) and issubclass(algorithm, Agent))


def _training_loop(algorithm: Any) -> TrainingLoop | None:
    """Return the ``algorithm`` argument of ``fit`` if it is a training loop; None if it is a name or keys.

    Raises:
        ConfigError: It is none of these.
    """
    if algorithm is None or isinstance(algorithm, (str, AlgorithmConfig, Mapping)):
        return None
    if not inspect.isroutine(algorithm):
        raise ConfigError(
            f"the algorithm is {shown(algorithm)}: give a name such as 'grpo', an AlgorithmConfig, a mapping of its "
            "keys, or an async function run(training)"
        )
    name = algorithm.__qualname__
    if not inspect.iscoroutinefunction(algorithm):
        raise ConfigError(f"the training loop {name} is not async: write async def, and await what it calls")
    try:
        inspect.signature(algorithm).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"the training loop {name} cannot be called as {name}(training) ({error}): give it that one parameter"
        ) from error
    return algorithm


def algorithm_keys(algorithm: AlgorithmKeys) -> dict[str, Any]:
    """Return the keys of the ``algorithm`` section that override those of a configuration.

    A name is that of an estimator (with loss ``ppo_clip``), of a loss (with GRPO advantages), or ``ppo``. Its formula
    replaces the configured one; other keys (epochs, credit, kl) stay.

    Raises:
        ConfigError: No such estimator or loss.
    """
    if isinstance(algorithm, AlgorithmConfig):
        return algorithm.model_dump(exclude_unset=True)
    if not isinstance(algorithm, str):
        return dict(algorithm)
    names = {*ADVANTAGES, *CRITIC_ADVANTAGES, *LOSSES, "ppo"}
    if algorithm not in names:
        raise ConfigError(
            f"algorithm {algorithm!r} is unknown{nearest(algorithm, names)}; known: {', '.join(sorted(names))}; or "
            "give an AlgorithmConfig, a mapping of its keys, or an async function run(training)"
        )
    default = {"advantage": algorithm} if algorithm in ADVANTAGES else {"advantage": "grpo", "loss": algorithm}
    fields = AlgorithmConfig.model_fields
    # Dr. GRPO divides by a constant that only the configuration can know.
    reset = [key for key in FORMULA_KEYS if (algorithm, key) != ("dr_grpo", "loss_scale")]
    defaults = {key: fields[key].get_default(call_default_factory=True) for key in reset}
    return {**defaults, "loss": "ppo_clip", **_FORMULAS.get(algorithm, default)}


def needs_critic(keys: Mapping[str, Any]) -> bool:
    """Whether the estimator of these keys reads a critic's values."""
    return keys.get("advantage") in CRITIC_ADVANTAGES


def _spec(argument: NameOrObject, what: str) -> dict[str, Any]:
    """Return name and configuration of an environment or agent in any form."""
    config: dict[str, Any] = {}
    if isinstance(argument, Mapping):
        unknown = sorted(argument.keys() - {"name", "config"})
        if unknown or "name" not in argument:
            raise ConfigError(f"{what} {shown(argument)}: a mapping holds name and, optionally, config")
        argument, config = argument["name"], dict(argument.get("config") or {})
    if isinstance(argument, str):
        return {"name": argument, "config": config}
    if isinstance(argument, (Agent, Env)):
        return {"name": reference_to(_class_of(argument, what), what), "config": config}
    return {"name": reference_to(argument, what), "config": config}


def _class_of(instance: Agent | Env, what: str) -> type[Any]:
    """Return the class of an object that can be recreated from it."""
    cls = type(instance)
    try:
        same = vars(cls()) == vars(instance)
    except TypeError:
        same = False
    if not same:
        raise ConfigError(
            f"{what} {cls.__qualname__} is an object with state, and the run creates its own instance: give "
            f'{{"name": {cls.__qualname__}, "config": {{...}}}} with the arguments of its constructor'
        )
    return cls


def _spec_overrides(key: str, spec: dict[str, Any] | None) -> dict[str, Any]:
    if spec is None:
        return {}
    return {f"{key}.name": spec["name"], **({f"{key}.config": spec["config"]} if spec["config"] else {})}


def _as_json(value: Any, key: str) -> Any:
    if isinstance(value, BaseModel):
        return _as_json(value.model_dump(), key)
    if isinstance(value, Mapping):
        return {str(name): _as_json(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item, key) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Path):
        return str(value)
    return reference_to(value, key)


def _without_gaps(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Drop each None of ``config`` that would hide a section of ``defaults``."""
    keys: dict[str, Any] = {}
    for key, value in config.items():
        section = defaults.get(key)
        if isinstance(section, Mapping) and isinstance(value, Mapping):
            keys[key] = _without_gaps(value, section)
        elif value is not None or not isinstance(section, Mapping):
            keys[key] = value
    return keys


def _check_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigError(
        "Trainer.fit() was called while an event loop runs. In a notebook or an async function write 'await "
        'trainer.fit_async(...)\'; in a file that a run loads, put the call under if __name__ == "__main__"'
    )
