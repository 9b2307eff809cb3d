"""TRL's GRPOTrainer: the names of its constructor, and what its reward functions, tools and environments are given."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from turnwise.chat.renderer import load_renderer
from turnwise.envs.core import ResetResult, in_thread
from turnwise.envs.rewards.registry import describe
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, EnvError, nearest, shown
from turnwise.ext.frameworks.compat.verl_agent_loop import LoopTokenizer
from turnwise.ext.frameworks.convert.trl import RULES, translate_trl
from turnwise.plugins import load_object, reference_to
from turnwise.tasks.core import Task
from turnwise.trajectory import Segment, Trajectory, messages_of
from turnwise.types import Message

if TYPE_CHECKING:
    from turnwise.trainer.train import TrainSummary

__all__ = ["GRPOConfig", "GRPOTrainer"]

# By position: what a call of a reward function has beside the columns.
_ARGUMENTS: Final = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_UNSUPPORTED: Final[Mapping[str, str]] = RULES["arguments"]
_MOST_ENVIRONMENTS: Final = 4096

LOCAL: Final = SimpleNamespace()
"""Objects without a name that another process could import: closures, partial functions, lambdas."""
_ENVIRONMENTS: Final[OrderedDict[str, Any]] = OrderedDict()
"""Environments of scored episodes, by session, until their group is rewarded; the oldest of failed groups go first."""


class GRPOConfig(SimpleNamespace):
    """The options of TRL's ``GRPOConfig`` by name; those that are not given have TRL's defaults."""

    def __init__(self, output_dir: str | Path | None = None, **options: Any) -> None:
        """Set the options; a trainer refuses unknown ones."""
        super().__init__(output_dir=output_dir, **options)


class GRPOTrainer:
    """Trains as TRL's ``GRPOTrainer`` is told to.

    Attributes:
        args: The options.
        translation: Their configuration here (``config``), and what became of each (``report()``).
    """

    def __init__(
        self,
        model: str | Path,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        args: Any = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        processing_class: Any = None,
        *,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        **others: Any,
    ) -> None:
        """Translate the arguments.

        Args:
            model: Folder of the model.
            reward_funcs: One function or several, plain or async. A call has the completions of one prompt.
            args: A :class:`GRPOConfig`, or TRL's own.
            train_dataset: Rows with a column ``prompt``, a text or messages.
            eval_dataset: Held-out rows, used where ``eval_strategy`` is given.
            processing_class: The model's own tokenizer.
            peft_config: A ``LoraConfig``.
            tools: Functions with type hints and Google docstrings.
            environment_factory: Makes an environment; or a dict, chosen from by the column ``environment``.
            **others: TRL's other arguments, which are refused.

        Raises:
            ConfigError: An argument, an option or a column has no meaning here or is missing; the message names it and
                the remedy.
        """
        _check_arguments(model, processing_class, others)
        self.args = GRPOConfig(f"{Path(model).name}-GRPO") if args is None else args
        values = _option_values(self.args)
        several = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        functions: list[Any] = [function for function in several if function is not None]
        factories = environment_factory if isinstance(environment_factory, Mapping) else {"": environment_factory}
        self._factories = {name: _reference(factory) for name, factory in factories.items() if factory is not None}
        rows, size = train_dataset, len(train_dataset) if isinstance(train_dataset, Sized) else None
        if rows is None and "" not in self._factories:
            raise ConfigError("train_dataset is required, unless one environment_factory makes all prompts")
        calls_tools, evaluates = bool(tools or self._factories), eval_dataset is not None
        self.translation = translate_trl(values, rows=size, evaluates=evaluates, calls_tools=calls_tools)
        config = self.translation.config
        count = config["steps"] * config["batch"]["groups"] if size is None else size
        rows = itertools.islice(itertools.repeat({}) if rows is None else rows, count)
        self._rows = list(self._records(rows, "train_dataset"))
        self._held_out = list(self._records(eval_dataset or (), "eval_dataset")) if "eval" in config else None
        self._set_model(str(model), peft_config)
        rewarding = self._set_env([_reference(tool) for tool in tools or ()])
        if functions:
            self._set_rewards(functions, rewarding, values.get("reward_weights"), with_text=not calls_tools)
        elif not rewarding:
            raise ConfigError("no reward: give reward_funcs, or an environment with get_reward()")
        self._summary: TrainSummary | None = None

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainSummary:
        """Train; anew, unless it resumes a run of the same ``output_dir``.

        Raises:
            ConfigError: ``output_dir`` holds files that are no run, or a launcher started several processes.
            TurnwiseError: The run cannot start or continue.
        """
        from turnwise import Trainer

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("WORLD_SIZE is above 1, but a run starts its own processes: start the script by python")
        config = self.translation.config
        home = Path(config["runs"], config["name"])
        if home.is_dir() and any(home.iterdir()) and not (home / "run.json").is_file():
            raise ConfigError(f"output_dir {home} holds files that are no run: name another folder")
        fresh = not resume_from_checkpoint
        self._summary = Trainer(config).fit(None, self._rows, self._held_out, fresh=fresh)
        return self._summary

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the trained model, by default (and for the run's own folder) to ``final_model`` in that of the run.

        Raises:
            ConfigError: Nothing is trained yet, or the folder is not empty.
        """
        from turnwise import export_model

        if self._summary is None:
            raise ConfigError("save_model: nothing is trained yet: call train() first")
        home = self._summary.directory.resolve()
        target = home if output_dir is None else Path(output_dir).resolve()
        target = home / "final_model" if target == home else target
        return export_model(home, target)

    def _records(self, dataset: Iterable[Mapping[str, Any]], name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows as tasks: columns as data."""
        for number, row in enumerate(dataset):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{name}: row {number} is {shown(row)}: a row is a dict of columns")
            if row.get("prompt") is None and not self._factories:
                raise ConfigError(f"{name}: row {number} has no column 'prompt'; it has {', '.join(row) or 'none'}")
            data = {column: value for column, value in row.items() if column != "prompt"}
            record: dict[str, Any] = {"prompt": row.get("prompt") or "", "data": data}
            if self._factories and "" not in self._factories:
                factory = self._factories.get(str(row.get("environment")))
                if factory is None:
                    raise ConfigError(
                        f"{name}: row {number} has environment {shown(row.get('environment'))}: environment_factory "
                        f"has {', '.join(self._factories)}"
                    )
                config = {"environment": factory, "chosen_by": "environment"}
                record["env"] = {"name": f"{__name__}:TRLEnv", "config": config}
            yield record

    def _set_model(self, model: str, peft_config: Any) -> None:
        self.translation.set("policies.main.model.path", model)
        if peft_config is None:
            return
        targets = peft_config.target_modules
        lora = {"rank": peft_config.r, "alpha": peft_config.lora_alpha}
        if targets is not None and not isinstance(targets, str):
            lora["targets"] = sorted(targets)
        elif targets not in (None, "all-linear"):
            raise ConfigError(f"peft_config: target_modules is {shown(targets)}: give a list of names, or all-linear")
        self.translation.set("policies.main.model.lora", lora)

    def _set_env(self, tools: list[str]) -> list[str]:
        """Return the names of the environments' own rewards."""
        env = {"tools": tools, "environment": self._factories.get("")}
        self.translation.set("rollout.env", {"name": f"{__name__}:TRLEnv", "config": env})
        # As in TRL, one of each kind is made at once: what its methods lack as tools is named.
        envs = [TRLEnv(tools, factory) for factory in self._factories.values() or [None]]
        for env_of_kind in envs:
            env_of_kind.toolset()
        return [env_of_kind.reward_name for env_of_kind in envs if env_of_kind.reward_name]

    def _set_rewards(
        self, functions: Sequence[Any], rewarding: Sequence[str], weights: Sequence[float] | None, *, with_text: bool
    ) -> None:
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(functions)} reward_funcs: one each")
        columns = {*_ARGUMENTS, *(("environments",) if self._factories else ())}
        for dataset, rows in (("train_dataset", self._rows), ("eval_dataset", self._held_out or [])):
            common = set.intersection(*(set(row["data"]) for row in rows)) if rows else set()
            for function in functions if rows else ():
                check_signature(function, columns | common, dataset)
        config, algorithm = self.translation.config, self.translation.config["algorithm"]
        factors = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        names = reward_names(functions)
        if algorithm.get("advantage") == "gdpo":
            # It weighs what it has normalised.
            by_name = {**dict.fromkeys(rewarding, 1.0), **dict(zip(names, factors, strict=True))}
            algorithm["advantage_options"] = {"reward_weights": by_name}
            factors = [1.0] * len(functions)
        arguments = {
            "functions": [_reference(function) for function in functions],
            "weights": factors,
            "model": config["policies"]["main"]["model"]["path"] if with_text else None,
            "steps": config["steps"],
            "updates": algorithm["minibatches"] * algorithm.get("epochs", 1),
        }
        reward = {"function": f"{__name__}:TRLRewards", "arguments": arguments, "in_evaluation": True}
        config["rollout"]["group_reward"] = reward


def _check_arguments(model: Any, processing_class: Any, others: Mapping[str, Any]) -> None:
    """Refuse what has no meaning here."""
    if not isinstance(model, (str, Path)):
        raise ConfigError(f"model is a {type(model).__name__}: give its folder (save_pretrained writes one)")
    try:
        source = model if processing_class is None else processing_class.name_or_path
    except AttributeError:
        source = type(processing_class).__name__
    if Path(source).resolve() != Path(model).resolve():
        raise ConfigError(f"processing_class is that of {source}: leave it out, a run reads that of its model's folder")
    for name, value in others.items():
        if name not in _UNSUPPORTED:
            raise ConfigError(f"GRPOTrainer has no argument {name!r}{nearest(name, _UNSUPPORTED)}")
        if value not in (None, (None, None), []):
            raise ConfigError(f"{name} has no counterpart: {_UNSUPPORTED[name]}")


def _option_values(args: Any) -> dict[str, Any]:
    """Return the options that were given; of TRL's own GRPOConfig, those that differ from its defaults."""
    if isinstance(args, GRPOConfig):
        return dict(vars(args))
    if not dataclasses.is_dataclass(args):
        raise ConfigError(f"args is {shown(args)}: give a GRPOConfig")
    values = {}
    for option in dataclasses.fields(args):
        value = getattr(args, option.name)
        default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
        if value != default:
            values[option.name] = value
    return values


def _reference(target: Any) -> str:
    """Return a reference to a function or class; to one without a name, for this process alone."""
    try:
        return reference_to(target, "function")
    except ConfigError:
        name = f"object_{len(vars(LOCAL))}"
        setattr(LOCAL, name, target)
        return f"{__name__}:LOCAL.{name}"


def reward_names(functions: Sequence[Any]) -> list[str]:
    """Return the names of reward functions, counted up where they repeat."""
    names: list[str] = []
    for function in functions:
        name = describe(function).rpartition(":")[2].rpartition(".")[2]
        count = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{count + 1}" if count else name)
    return names


def check_signature(function: Any, names: Iterable[str], dataset: str) -> None:
    """Check that a reward function can be called.

    Args:
        function: The function.
        names: What it may read.
        dataset: Where columns come from, for the message.

    Raises:
        ConfigError: It is a model or no function, takes arguments by position, or reads a column that is not there.
    """
    if isinstance(function, str) or "forward" in dir(function):
        label = shown(function) if isinstance(function, str) else type(function).__name__
        raise ConfigError(f"reward_funcs: {label} is a model: {_UNSUPPORTED['reward_processing_classes']}")
    if not callable(function):
        raise ConfigError(f"reward_funcs: {shown(function)} is no function: f(prompts, completions, **kwargs)")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"reward function {describe(function)} takes {parameter.name} by position, but is called by name: "
                "write f(prompts, completions, **kwargs)"
            )
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if required and parameter.name not in names:
            columns = sorted({*names} - {*_ARGUMENTS}) or ["prompt alone"]
            raise ConfigError(
                f"reward function {describe(function)} reads {parameter.name!r}, which is no column of {dataset}"
                f"{nearest(parameter.name, names)}; it has {', '.join(columns)}"
            )


class TRLEnv(ToolEnv):
    """Tools as functions, and the methods of an object that is made for each episode.

    Attributes:
        environment: The object, or None.
        reward_name: The name of its own reward; empty without one.
    """

    def __init__(self, tools: Sequence[str] = (), environment: str | None = None, chosen_by: str | None = None) -> None:
        """Load the functions, and make the object.

        Args:
            tools: References to functions.
            environment: Reference to what makes the object: ``reset(**row)`` returns None or what is appended to the
                last message, ``get_reward()`` is optional, and all other public methods are tools.
            chosen_by: The column that chose it, which ``reset`` does not get.
        """
        self.environment = None if environment is None else load_object(environment, "environment_factory")()
        self.tools = [load_object(reference, "tool") for reference in tools]
        self.reward_name, self._chosen_by = "", chosen_by
        if self.environment is None:
            return
        kind = type(self.environment)
        methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
        if "reset" not in methods:
            raise ConfigError(f"environment_factory: {kind.__qualname__} has no method reset(**row)")
        self.reward_name = kind.__name__ if "get_reward" in methods else ""
        self.tools += [getattr(self.environment, name) for name in methods if name not in ("reset", "get_reward")]

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:  # noqa: ARG002
        """Start with the prompt, and with what the object's ``reset`` returns for the row."""
        if task is None:
            raise EnvError("TRLEnv.reset got no task: a row is its prompt")
        messages = task.messages()
        if self.environment is None:
            return messages, {}
        row = {"prompt": task.prompt, **task.data} if task.prompt else dict(task.data)
        row.pop(self._chosen_by or "", None)
        observation = await self._ask("reset", row)
        if observation is not None:
            messages[-1] = _appended(messages[-1], observation)
        return messages, {}

    async def score(self, final: Message | None) -> dict[str, float]:  # noqa: ARG002
        """Return the object's own reward by the name of its class, if it has one."""
        session = None if self.main_session is None else self.main_session()
        if self.environment is not None and session is not None:
            _ENVIRONMENTS[session.id] = self.environment
            while len(_ENVIRONMENTS) > _MOST_ENVIRONMENTS:
                _ENVIRONMENTS.popitem(last=False)
        reward = await self._ask("get_reward", {}) if self.reward_name else None
        return {} if reward is None else {self.reward_name: float(reward)}

    async def _ask(self, method: str, arguments: dict[str, Any]) -> Any:
        result = await in_thread(self, getattr(self.environment, method), (), arguments)
        return await result if inspect.isawaitable(result) else result


def _appended(message: Message, observation: Any) -> Message:
    content: Any = message["content"]
    if isinstance(content, str) and isinstance(observation, str):
        return {**message, "content": content + observation}
    parts = [[{"type": "text", "text": part}] if isinstance(part, str) else part for part in (content, observation)]
    return {**message, "content": [*parts[0], *parts[1]]}


class TRLRewards:
    """Calls reward functions with the completions of a group, as TRL does with those of a batch."""

    def __init__(
        self, functions: Sequence[str], weights: Sequence[float], model: str | None, steps: int, updates: int
    ) -> None:
        """Load the functions.

        Args:
            functions: References to them.
            weights: Factors of their values.
            model: Folder of the tokenizer by which completions are one text; None gives messages with calls.
            steps: Steps of the run.
            updates: Optimizer steps of one.
        """
        self._functions = [load_object(reference, "reward function") for reference in functions]
        self._names, self._weights = reward_names(self._functions), weights
        self._tokenizer = None if model is None else LoopTokenizer(load_renderer(model))
        self._steps, self._updates = steps, updates

    async def __call__(self, task: Task, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
        """Return the weighted values by function of each member.

        A member for which all functions return None gets the mean of the others, as ``unscored``: it is in no
        advantage of TRL.
        """
        arguments = self.arguments(task, trajectories)
        values = await asyncio.gather(*(self._values(function, arguments) for function in self._functions))
        rewards = [
            {
                name: weight * value
                for name, weight, column in zip(self._names, self._weights, values, strict=True)
                if (value := column[number]) is not None
            }
            for number in range(len(trajectories))
        ]
        totals = [sum(parts.values()) for parts in rewards if parts]
        mean = sum(totals) / len(totals) if totals else 0.0
        return [parts or {"unscored": mean} for parts in rewards]

    def arguments(self, task: Task, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Return what TRL would give a reward function: a list with one entry for each completion, by name."""
        paths = [member.path(len(member.segments) - 1) if member.segments else () for member in trajectories]
        ids = [[int(number) for segment in path[1:] for number in segment.token_ids] for path in paths]
        is_text = isinstance(task.prompt, str) and task.prompt != ""
        prompts: list[Any] = [task.prompt if is_text else _messages(path[:1]) for path in paths]
        if self._tokenizer is None:
            completions: list[Any] = [_messages(path[1:]) for path in paths]
        else:
            texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in ids]
            completions = [text if is_text else [{"role": "assistant", "content": text}] for text in texts]

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for trajectory, value in zip(trajectories, values, strict=True):
                trajectory.turn_notes.setdefault("", {})[column] = str(value)

        def log_metric(name: str, value: float) -> None:
            for trajectory in trajectories:
                trajectory.metrics[name] = float(value)

        columns = {name: [value] * len(trajectories) for name, value in task.data.items()}
        environments = [_ENVIRONMENTS.pop(trajectory.id, None) for trajectory in trajectories]
        reserved = (prompts, completions, ids, self._state(trajectories), log_extra, log_metric)
        if any(environment is not None for environment in environments):
            columns["environments"] = environments
        return {**columns, **dict(zip(_ARGUMENTS, reserved, strict=True))}

    def _state(self, trajectories: Sequence[Trajectory]) -> SimpleNamespace:
        """Return the progress of training: what the weights that sampled have seen."""
        versions = [
            version
            for trajectory in trajectories
            for segment in trajectory.segments
            for version, _, _ in segment.weight_versions
        ]
        step = max(versions, default=0)
        return SimpleNamespace(
            global_step=step * self._updates, max_steps=self._steps * self._updates, epoch=step / self._steps
        )

    async def _values(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[float | None]:
        parameters, members = inspect.signature(function).parameters, len(arguments["prompts"])
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        values = await asyncio.to_thread(function, **arguments)
        values = list(await values if inspect.isawaitable(values) else values)
        if len(values) != members:
            raise EnvError(
                f"reward function {describe(function)} returned {len(values)} rewards for {members} completions: "
                "return one for each"
            )
        try:
            return [None if value is None else float(value) for value in values]
        except (TypeError, ValueError) as error:
            raise EnvError(
                f"reward function {describe(function)} returned {shown(values)}: return a number or None for each "
                "completion"
            ) from error


def _messages(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """Return recorded messages with the keys that TRL's have."""
    messages = [
        {key: record[key] for key in ("role", "name", "content", "tool_calls") if record.get(key) is not None}
        for segment in segments
        for record in messages_of(segment)
    ]
    for message in messages:
        if "tool_calls" in message:
            calls = message["tool_calls"]
            message["tool_calls"] = [{"type": "function", "function": call["function"]} for call in calls]
    return messages
