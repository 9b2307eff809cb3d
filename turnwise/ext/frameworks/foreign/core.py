"""ForeignEnv: an environment of another framework, in this process or in another interpreter."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import quote, urlencode

import orjson

from turnwise.envs.core import Env, ResetResult, Score, StepResult
from turnwise.envs.forking import Memo
from turnwise.envs.registration import env_class, env_prefixes, register_prefix
from turnwise.envs.results import ScoreParts
from turnwise.errors import (
    ConfigError,
    EnvError,
    RegistryError,
    TaskError,
    ToolSchemaError,
    TurnwiseError,
    nearest,
    shown,
)
from turnwise.ext.frameworks.foreign import inside
from turnwise.ext.frameworks.foreign.inside.core import Failure, Station, plain
from turnwise.ext.frameworks.foreign.pool import Worker, WorkerSpec, ask_once, pools
from turnwise.plugins import load_file
from turnwise.tasks.core import Task
from turnwise.tools.core import FunctionTool
from turnwise.types import Message, ToolCall

_log = logging.getLogger(__name__)
_EPISODES: Final = itertools.count(1)
_SEEDS: Final = 2**31
"""Frameworks take seeds of 32 bits."""
_SHOWN_NAMES: Final = 12
_CHECKED: Final = 32
"""Environments whose arguments are tried in an interpreter that is started for it."""
SPLITS: Final = {"train": 0, "validation": 500_000_000, "test": 1_000_000_000}
"""Distance of the seeds of a split from those of ``train``: none has a seed of another."""
_DEEPEST: Final = 100
"""Most levels of a call's arguments: what frameworks validate and send with fails at some 250."""
_BATCH: Final = 4096
"""Rows of one request, for which an interpreter is started; a worker gives fewer where they are long."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework whose environments can be named.

    Attributes:
        prefix: What stands before the colon of a name.
        driver: Name of a driver in ``inside/``, or the path of one.
        requirement: What pip installs: the package, and the version that this adapter is tested with.
        system_prompt: Default of ``system_prompt``.
        example: The name of one of its environments.
        has_rows: Whether its tasks are rows of a dataset, which the framework loads; else they are seeds.
        forks: Whether its episodes can be copied.
        has_levels: Whether its tasks may name a level of difficulty.
        apart: Whether each environment needs workers of its own, since a process of the framework has one run.
    """

    prefix: str
    driver: str
    requirement: str
    system_prompt: str | None = None
    example: str = "NAME"
    has_rows: bool = False
    forks: bool = True
    has_levels: bool = False
    apart: bool = False

    @property
    def version(self) -> str:
        """The tested version; empty where none is."""
        return self.requirement.partition("==")[2]

    def env_class(self, name: str) -> type[ForeignEnv]:
        """Return the class of an environment by its name in the framework. Raises RegistryError if it is empty."""
        return _named_class(self, name)


_FRAMEWORKS: dict[str, Framework] = {
    "verifiers": Framework("verifiers", "verifiers", "verifiers==0.4.0", example="TASKSET", has_rows=True, forks=False)
}


def register_framework(
    prefix: str, driver: str | Path, requirement: str = "", system_prompt: str | None = None
) -> None:
    """Register a further framework, whose environments are then named ``prefix:NAME``.

    Args:
        prefix: What stands before the colon.
        driver: Path of its driver: a Python file as described in ``turnwise/ext/frameworks/foreign/inside/core.py``.
        requirement: What pip installs, with the tested version: ``package==1.2``.
        system_prompt: Default of ``system_prompt``.

    Raises:
        RegistryError: The prefix is taken.
    """
    path = str(Path(driver).absolute())
    register_prefix(prefix, "turnwise.ext.frameworks.foreign.core:foreign_class")
    _FRAMEWORKS[prefix] = Framework(prefix, path, requirement, system_prompt)


class ForeignEnv(Env):
    """An environment of another framework.

    Its prompts, observations, rewards and ends are the framework's. It is made by its name, such as
    ``reasoning-gym:chain_sum``.

    Attributes:
        framework: The framework.
        env_name: Name of the environment in it.
    """

    framework: ClassVar[Framework]
    env_name: ClassVar[str]
    uncopied = Env.uncopied | {"tools", "_worker", "_episode", "_station"}

    _station: Station | None = None
    _worker: Worker | None = None
    _episode: int | None = None

    def __init__(
        self,
        kwargs: dict[str, Any] | None = None,
        *,
        python: str | None = None,
        system_prompt: str | None = "",
        timeout: float = 120.0,
        memory: int | None = 8 * 2**30,
        processes: int = 1,
    ) -> None:
        """Make an environment, and check that its framework is installed and knows it.

        Args:
            kwargs: The framework's own arguments of this environment.
            python: An interpreter that has the framework; by default it runs in this process.
            system_prompt: The system message; an empty text is the framework's default, None is none.
            timeout: Seconds of one request, with ``python``; a worker that takes longer is killed.
            memory: Bytes of a worker's address space, with ``python``; None is no limit.
            processes: Workers of this interpreter and framework, with ``python``.

        Raises:
            ConfigError: An argument is out of range, or the framework is not installed or refuses its arguments.
            RegistryError: The framework has no such environment.
        """
        name = f"{self.framework.prefix}:{self.env_name}"
        _check_numbers(name, timeout, memory, processes)
        _check_arguments(name, kwargs, system_prompt)
        self._timeout = timeout
        self._request: dict[str, Any] = {
            "name": self.env_name,
            "kwargs": dict(kwargs or {}),
            "system_prompt": self.framework.system_prompt if system_prompt == "" else system_prompt,
        }
        self._spec = None
        if python is not None:
            only = orjson.dumps(self._request, option=orjson.OPT_SORT_KEYS).decode() if self.framework.apart else ""
            self._spec = WorkerSpec(_interpreter(name, python), self.framework.driver, memory, processes, only)
        elif self.framework.apart:
            raise ConfigError(
                f"{name}: {self.framework.prefix} needs a separate process: name an interpreter that has it "
                f"(pip install '{self.framework.requirement}'): python=PATH"
            )
        if self._spec is None:
            self._station = _station(self.framework)
        _check_openable(self.framework, self._spec, orjson.dumps(self._request, option=orjson.OPT_SORT_KEYS))
        rows = type(self).tasks_of
        if rows is not None:
            vars(self)["default_tasks"] = rows({"python": python, "kwargs": kwargs})

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Begin an episode: of the row that the task names, or of the seed."""
        await self._leave()
        self._episode = next(_EPISODES)
        if self._spec is not None:
            pool = await pools().get()
            self._worker = await self._named(pool.take(self._spec, self._episode))
        data = None if task is None else task.data or None
        answer = await self._ask("reset", **self._request, data=data, seed=self._seed(data, seed))
        self.tools = [self._tool(schema) for schema in answer.get("tools") or ()]
        info = dict(answer.get("info") or {})
        info.update({key: answer[key] for key in ("agents", "turn") if key in answer})
        return [_message(message) for message in answer["messages"]], info

    async def step(self, action: Message) -> StepResult:
        """Give the message to the framework."""
        answer = await self._ask("step", message=_plain_message(action))
        info = dict(answer.get("info") or {})
        for key in ("rewards", "metrics", "notes", "turn", "agent_rewards"):
            if answer.get(key):
                info[key] = answer[key]
        messages = [_message(message) for message in answer["messages"]]
        # What is no finite number is refused by the check of the result, which names it.
        reward: Any = answer.get("reward")
        return StepResult(messages, reward, answer["terminated"], answer["truncated"], info)

    async def score(self, final: Message | None) -> Score:
        """Return the framework's score of an episode that ended outside of it (a limit); 0 where it has none."""
        answer = await self._ask("score", message=None if final is None else _plain_message(final))
        score = answer["score"]
        return ScoreParts(score) if isinstance(score, dict) else score

    async def _fork_state(self, fork: Any, memo: Memo) -> None:
        """Let the framework copy the episode."""
        await super()._fork_state(fork, memo)
        fork.tools, fork._station, fork._worker = list(self.tools), self._station, self._worker
        to = next(_EPISODES)
        await self._ask("fork", to=to)
        fork._episode = to
        if self._worker is not None:
            self._worker.episodes.add(to)

    async def close(self) -> None:
        """End the episode."""
        await self._leave()

    def _seed(self, data: Mapping[str, Any] | None, seed: int | None) -> int | None:
        """Return the seed of an episode: that of the task, where it is one (:func:`tasks`), else the one given."""
        if data is not None and not self.framework.has_rows:
            first, index = data.get("seed"), data.get("index")
            if type(first) is int and type(index) is int:
                seed = first + index
        return None if seed is None else seed % _SEEDS

    def _tool(self, schema: Any) -> FunctionTool:
        try:
            return FunctionTool(_answered_by_step, schema=copy.deepcopy(dict(schema)))
        except (ToolSchemaError, TypeError, ValueError, KeyError) as error:
            name = f"{self.framework.prefix}:{self.env_name}"
            raise EnvError(f"{name}: one of its tools cannot be said as a schema: {error}: {shown(schema)}") from error

    async def _leave(self) -> None:
        if self._episode is None:
            return
        episode, worker = self._episode, self._worker
        try:
            if worker is None or worker.ended is None:
                await self._ask("close")
        finally:
            self._episode, self._worker = None, None
            if worker is not None:
                worker.episodes.discard(episode)

    async def _ask(self, operation: str, **values: Any) -> dict[str, Any]:
        if self._episode is None:
            raise EnvError("no episode runs: call reset() first")
        request = {"op": operation, "episode": self._episode, **values}
        name = f"{self.framework.prefix}:{self.env_name}"
        try:
            if self._worker is not None:
                answer: dict[str, Any] = await self._named(self._worker.call(request, self._timeout))
            elif self._station is not None:
                answer = await self._station.handle(request)
            else:
                raise EnvError(f"{name}: its worker did not start: call reset() again")
        except Failure as failure:
            raise _to_error(self.framework, self.env_name, failure, self._spec) from failure
        return answer

    async def _named(self, awaitable: Any) -> Any:
        try:
            return await awaitable
        except EnvError as error:
            raise EnvError(f"{self.framework.prefix}:{self.env_name}: {error}") from error


def foreign_class(prefix: str, name: str) -> type[ForeignEnv]:
    """Return the class of an environment by the two parts of its name."""
    return _FRAMEWORKS[prefix].env_class(name)


@functools.cache
def _named_class(framework: Framework, name: str) -> type[ForeignEnv]:
    prefix = framework.prefix
    if not name:
        raise RegistryError(f"{prefix!r} needs a name: write {prefix}:{framework.example}")
    return type(
        name,
        (ForeignEnv,),
        {
            # Together they are the name by which it is made.
            "__module__": prefix,
            "__qualname__": name,
            "__doc__": f"{name} of {prefix}.",
            "framework": framework,
            "env_name": name,
            "forks": "copy" if framework.forks else None,
            "default_tasks": f"turnwise.ext.frameworks.foreign.core:tasks?env={quote(f'{prefix}:{name}')}",
            "tasks_of": staticmethod(functools.partial(_rows_of, f"{prefix}:{name}")) if framework.has_rows else None,
        },
    )


def _rows_of(env: str, config: Mapping[str, Any]) -> str:
    """Return the source of the rows of an environment, which are read where the framework is."""
    python, kwargs = config.get("python"), config.get("kwargs")
    fields = {"env": env, "python": python, "kwargs": orjson.dumps(kwargs).decode() if kwargs else None}
    query = urlencode({key: value for key, value in fields.items() if value is not None})
    return f"turnwise.ext.frameworks.foreign.core:tasks?{query}"


def framework_of(env: str) -> tuple[Framework, str]:
    """Return the framework and the rest of a name. Raises RegistryError."""
    prefix, _, name = env.partition(":")
    families = env_prefixes()
    cls = env_class(env) if prefix in families and name else None
    if cls is None or not issubclass(cls, ForeignEnv):
        raise RegistryError(
            f"{env!r} is no environment of another framework{nearest(prefix, families)}; such names begin with "
            f"{', '.join(f'{prefix}:' for prefix in _FRAMEWORKS)}, or as packages of examples/ say"
        )
    return cls.framework, name


def tasks(
    env: str,
    split: str = "train",
    size: int | None = None,
    seed: int = 0,
    python: str | None = None,
    kwargs: dict[str, Any] | None = None,
    start: int = 0,
    levels: Sequence[int] | None = None,
) -> Iterator[Task]:
    """Yield the tasks of an environment: the rows of its dataset, or seeds if it draws its episodes.

    Args:
        env: Its name, such as ``reasoning-gym:chain_sum``.
        split: ``train``, ``validation`` or ``test``; a dataset may have others.
        size: Number of tasks; by default 1000 seeds, or all rows of a dataset.
        seed: First seed of ``train``; those of other splits are far from them.
        python: The interpreter that has the framework, where its dataset has rows.
        kwargs: The framework's own arguments of this environment, where its dataset has rows.
        start: Number of the first task.
        levels: Levels of the framework's own curriculum, which the tasks have in turn: ``level`` of their data.

    Raises:
        TaskError: An argument is out of range, or the framework has no levels.
        RegistryError: There is no such framework or environment.
        ConfigError: A framework with rows is not installed.
    """
    framework, name = framework_of(env)
    if size is not None and size < 1:
        raise TaskError(f"tasks of {env}: size is {size!r}: it must be at least 1")
    if framework.has_rows:
        request = {"op": "tasks", "name": name, "kwargs": kwargs or {}, "system_prompt": None, "split": split}
        while size is None or start < size:
            count = _BATCH if size is None else min(_BATCH, size - start)
            answer = ask(framework, python, {**request, "start": start, "count": count})
            if size is None and answer["endless"]:
                raise TaskError(f"tasks of {env}: its dataset has no end: give their number (size)")
            for row in answer["rows"]:
                yield Task(f"{name}-{split}-{start}", row["prompt"], row["data"])
                start += 1
            if not answer["more"]:
                return
        return
    if split not in SPLITS:
        raise TaskError(f"tasks of {env}: split is {split!r}: it must be one of {', '.join(SPLITS)}")
    count = 1000 if size is None else size
    if not 0 <= seed <= SPLITS["validation"] - count:
        raise TaskError(f"tasks of {env}: seed is {seed}: it must be from 0 to {SPLITS['validation'] - count}")
    if levels is not None:
        _check_levels(env, framework, levels)
    first = SPLITS[split] + seed
    for index in range(start, count):
        data = {"seed": first, "size": count, "index": index}
        if levels is None:
            yield Task(f"{name}-{split}-{seed + index}", "", data)
        else:
            level = levels[index % len(levels)]
            yield Task(f"{name}-{split}-{seed + index}-level-{level}", "", {**data, "level": level})


def _check_levels(env: str, framework: Framework, levels: Any) -> None:
    if not framework.has_levels:
        raise TaskError(f"tasks of {env}: {framework.prefix} has no levels: remove levels")
    has_list = isinstance(levels, (list, tuple)) and levels
    if not has_list or not all(type(level) is int and level >= 0 for level in levels):
        raise TaskError(
            f"tasks of {env}: levels is {shown(levels)}: it must be a list of numbers from 0, such as [0,1,2]"
        )


def ask(framework: Framework, python: str | None, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request that belongs to no episode, from this process or a worker. Blocks.

    Raises:
        ConfigError: The framework is not installed, or refuses the arguments.
        RegistryError: It has no such environment.
        EnvError: Its code raised.
    """
    label = f"{framework.prefix}:{request['name']}"
    spec = None
    if python is not None:
        spec = WorkerSpec(_interpreter(label, python), framework.driver, None, 1)
    return _ask_once(framework, spec, request)


def _ask_once(framework: Framework, spec: WorkerSpec | None, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if spec is not None:
            return ask_once(spec, request)
        answer: dict[str, Any] = _station(framework).at_once(request)
    except Failure as failure:
        raise _to_error(framework, str(request["name"]), failure, spec) from failure
    except EnvError as error:
        raise EnvError(f"{framework.prefix}:{request['name']}: {error}") from error
    return answer


@functools.lru_cache(maxsize=4096)
def _check_openable(framework: Framework, spec: WorkerSpec | None, request: bytes) -> None:
    """Check that an environment can be made: once, as an interpreter takes its time to start."""
    arguments = orjson.loads(request)
    try:
        # Rows may have different arguments; the episodes of later rows report what is wrong with theirs.
        # A framework with rows lists no names either: one start of an interpreter is enough.
        skips_names = (arguments["kwargs"] or framework.has_rows) and _check_openable.cache_info().currsize < _CHECKED
        answer = None if spec is None or skips_names else _list_names(framework, spec)
        if answer is None or not answer["names"]:
            answer = _ask_once(framework, spec, {"op": "open", **arguments})
        elif arguments["name"] not in answer["names"]:
            raise Failure("unknown", f"there is no {arguments['name']!r}", known=answer["names"])
    except Failure as failure:
        raise _to_error(framework, arguments["name"], failure, spec) from failure
    _warn_of_version(framework, str(answer["version"]))


@functools.cache
def _list_names(framework: Framework, spec: WorkerSpec) -> dict[str, Any]:
    """Return the environments of a framework in an interpreter, which is started once for all of them."""
    try:
        return ask_once(spec, {"op": "names"})
    except EnvError as error:
        raise EnvError(f"{framework.prefix}: {error}") from error


@functools.cache
def _warn_of_version(framework: Framework, version: str) -> None:
    if version and framework.version and version != framework.version:
        package = framework.requirement.partition("==")[0]
        _log.warning(
            "%s: version %s of %s is installed, and %s is what the adapter is tested with: pip install '%s'",
            framework.prefix,
            version,
            package,
            framework.version,
            framework.requirement,
        )


@functools.cache
def _station(framework: Framework) -> Station:
    """Return the episodes of a framework in this process."""
    if framework.driver.endswith(".py"):
        # What drivers import where an interpreter of their framework runs them.
        sys.modules.update({"turnwise_foreign": inside, "turnwise_foreign.core": inside.core})
        return Station(load_file(framework.driver, f"the driver of {framework.prefix!r}"))
    return Station(importlib.import_module(f"turnwise.ext.frameworks.foreign.inside.{framework.driver}"))


def _to_error(framework: Framework, name: str, failure: Failure, spec: WorkerSpec | None) -> TurnwiseError:
    label = f"{framework.prefix}:{name}"
    if failure.kind == "missing":
        python = "this interpreter" if spec is None else spec.python
        remedy = f"{'' if spec is None else f'{spec.python} -m '}pip install '{framework.requirement}'"
        other = ", or name an interpreter that has it: python=PATH" if spec is None else ""
        return ConfigError(f"{label}: {python} has no {failure.details['module']} ({failure}): {remedy}{other}")
    if failure.kind == "unknown":
        names = failure.details["known"]
        close = nearest(name, names)
        more = len(names) - _SHOWN_NAMES
        few = ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
        hint = failure.details.get("hint", "")
        return RegistryError(f"{framework.prefix} has no {name!r}{close or f'; it has {few}'}{hint}")
    if failure.kind == "config":
        return ConfigError(f"{label} refuses its arguments (kwargs): {failure}")
    stack = failure.details.get("stack")
    return EnvError(f"{label}: {failure}" + (f"\n{stack}" if stack and spec is not None else ""))


def _interpreter(label: str, python: Any) -> str:
    if not isinstance(python, (str, os.PathLike)):
        raise ConfigError(f"{label}: python is {shown(python)}: it must be the path of an interpreter")
    path = Path(os.path.abspath(Path(python).expanduser()))
    interpreter = path / "bin" / "python"
    if path.is_dir():
        hint = f"write {interpreter}" if interpreter.exists() else "name an interpreter"
        raise ConfigError(f"{label}: python is {python!r}, a folder: {hint}")
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(f"{label}: python is {python!r}: there is no such program: name an interpreter")
    return str(path)


def _check_arguments(label: str, kwargs: Any, system_prompt: Any) -> None:
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ConfigError(f"{label}: kwargs is {shown(kwargs)}: it must be a mapping of the framework's own arguments")
    try:
        orjson.dumps(kwargs)
    except TypeError as error:
        raise ConfigError(f"{label}: kwargs is {shown(kwargs)}: it must be of JSON values: {error}") from error
    if system_prompt is not None and not isinstance(system_prompt, str):
        raise ConfigError(f"{label}: system_prompt is {shown(system_prompt)}: it must be a text, or null for none")


def _check_numbers(label: str, timeout: Any, memory: Any, processes: Any) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ConfigError(f"{label}: timeout is {shown(timeout)}: it must be a number of seconds above 0")
    if memory is not None and (type(memory) is not int or memory < 2**26):
        raise ConfigError(
            f"{label}: memory is {shown(memory)}: it must be a number of bytes, at least {2**26}, or null"
        )
    if type(processes) is not int or processes < 1:
        raise ConfigError(f"{label}: processes is {shown(processes)}: it must be a whole number of at least 1")


def _plain_message(message: Message) -> dict[str, Any]:
    """Return a message as JSON values; calls have id, name, arguments, raw and error."""
    calls = [_plain_call(call) for call in message.get("tool_calls") or ()]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    data: dict[str, Any] = plain({**rest, **({"tool_calls": calls} if calls else {})})
    return data


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """Return a call as JSON values; one that is nested too deeply for a framework's parsers is malformed."""
    arguments, raw, error = call.arguments, call.raw, call.error
    level: list[Any] = [arguments]
    for _ in range(_DEEPEST):
        containers = [value for value in level if isinstance(value, (dict, list))]
        level = [member for value in containers for member in (value.values() if isinstance(value, dict) else value)]
    if level:
        arguments, error = {}, "the arguments are nested too deeply"
    if error is not None:
        # Frameworks parse it again, and may end the episode where that recurses.
        raw = "".join(re.split(r"([\[{])", raw)[: 2 * _DEEPEST])
    return {"id": call.id, "name": call.name, "arguments": arguments, "raw": raw, "error": error}


def _message(data: Mapping[str, Any]) -> Message:
    message: Any = dict(data)
    if message.get("tool_calls"):
        message["tool_calls"] = [
            ToolCall(call["id"], call["name"], call["arguments"], call.get("raw", ""), call.get("error"))
            for call in message["tool_calls"]
        ]
    result: Message = message
    return result


async def _answered_by_step(**arguments: Any) -> None:
    del arguments
    raise EnvError("tools of another framework are called by whole messages (Episode.step), not one by one")
