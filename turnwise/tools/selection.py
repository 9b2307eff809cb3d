"""Per-task tools: the selected tools, their keyword arguments, and the instances of an episode."""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self, TypeAlias

import yaml

from turnwise.config import load_config
from turnwise.errors import (
    INTERRUPTS,
    ConfigError,
    EnvError,
    RegistryError,
    TaskError,
    ToolSchemaError,
    TurnwiseError,
    nearest,
    shown,
    undo_on_error_async,
)
from turnwise.plugins import check_imported, load_file, load_object, make_importable
from turnwise.tasks.core import Task
from turnwise.tools.config import NamedToolConfig, ToolEntry, ToolFile, ToolsConfig
from turnwise.tools.core import SHIPPED, AgentData, BaseTool, FunctionTool, Tool, as_tool, get_tool, tool_names
from turnwise.tools.response import ToolResponse, as_response
from turnwise.tools.schema import OpenAIFunctionToolSchema, detached
from turnwise.tools.secrets import Secrets, with_secrets

ToolsKwargs: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By tool name and then ``create_kwargs``, ``execute_kwargs``, ``calc_reward_kwargs`` or ``release_kwargs``."""


class ToolInstances:
    """The BaseTool instances of one episode; ``secrets`` is called on errors only."""

    def __init__(
        self, tools: Mapping[str, Tool], kwargs: ToolsKwargs, data: AgentData, secrets: Callable[[], Secrets]
    ) -> None:
        self._tools = {name: tool for name, tool in tools.items() if isinstance(tool, BaseTool)}
        self._kwargs = kwargs
        self._data = data
        self._secrets = secrets
        self._ids: dict[str, str] = {}
        self._created_rewards: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._tools)

    def id_of(self, name: str) -> str:
        """Return the instance id of a tool."""
        return self._ids[name]

    def kwargs(self, name: str, key: str) -> dict[str, Any]:
        """Return the keyword arguments of a method, by a key such as ``execute_kwargs``."""
        arguments = dict(self._kwargs.get(name, {}).get(key, {}))
        tool = self._tools.get(name)
        if tool is None:
            return arguments
        names, takes_any = parameters_of(tool, key)
        if key == "create_kwargs" and ("create_kwargs" in names or takes_any):
            # As one dict too. Where it is the only way in, the names in it are not arguments.
            complete = dict(arguments)
            arguments = arguments if takes_any else {key: value for key, value in arguments.items() if key in names}
            arguments.setdefault("create_kwargs", complete)
        if "agent_data" in names or (key == "execute_kwargs" and takes_any):
            arguments.setdefault("agent_data", self._data)
        return arguments

    async def create(self) -> None:
        """Create all instances; on EnvError those created before are released."""
        for name, tool in self._tools.items():
            async with undo_on_error_async(self.release):
                id_and_response = await self._run_hook(name, "create", None)
                if not (
                    isinstance(id_and_response, tuple)
                    and len(id_and_response) == 2
                    and isinstance(id_and_response[0], str)
                ):
                    raise EnvError(
                        f"{type(tool).__qualname__}.create returned {id_and_response!r}: it must return (instance_id, "
                        "ToolResponse)"
                    )
            self._ids[name] = id_and_response[0]
            response = as_response(name, id_and_response[1])
            if response.reward is not None:
                self._created_rewards[name] = response.reward

    async def fork(self, parent: ToolInstances) -> None:
        """Become forks of another episode's instances; on EnvError those made before are released."""
        self._created_rewards = dict(parent._created_rewards)
        for name, instance in parent._ids.items():
            async with undo_on_error_async(self.release):
                fork_id = await self._run_hook(name, "fork", instance)
                if not isinstance(fork_id, str) or fork_id == instance:
                    raise EnvError(
                        f"{type(self._tools[name]).__qualname__}.fork returned {fork_id!r}: it must return the id of "
                        "a new instance"
                    )
            self._ids[name] = fork_id

    async def rewards(self) -> dict[str, float]:
        """Return the non-zero ``calc_reward`` values as ``tool/<name>``; EnvError if one raises or is not finite."""
        values = dict(self._created_rewards)
        for name, instance in self._ids.items():
            value = await self._run_hook(name, "calc_reward", instance)
            # A ToolResponse holds numbers to their contract.
            reward = ToolResponse(reward=value).reward
            values[name] = values.get(name, 0.0) + (reward or 0.0)
        return {f"tool/{name}": value for name, value in values.items() if value}

    async def release(self) -> None:
        """Release every instance exactly once; idempotent. EnvError of one does not keep the others from release."""
        errors: list[BaseException] = []
        while self._ids:
            name, instance = self._ids.popitem()
            try:
                await self._run_hook(name, "release", instance)
            except (TurnwiseError, asyncio.CancelledError) as error:
                errors.append(error)
        cancelled = [error for error in errors if isinstance(error, asyncio.CancelledError)]
        if errors:
            raise (cancelled or errors)[0]

    async def _run_hook(self, name: str, method: str, instance: str | None) -> Any:
        tool = self._tools[name]
        methods: dict[str, Callable[..., Any]] = {
            "create": tool.create,
            "fork": tool.fork,
            "calc_reward": tool.calc_reward,
            "release": tool.release,
        }
        try:
            arguments = {"agent_data": self._data} if method == "fork" else self.kwargs(name, f"{method}_kwargs")
            result: Any = methods[method](instance, **arguments)
            return await result if inspect.isawaitable(result) else result
        except TurnwiseError as error:
            self._secrets().scrub(error)
            raise
        except INTERRUPTS:
            raise
        except BaseException as error:  # noqa: BLE001 - a tool's code: what it raises is named as its own
            secrets = self._secrets()
            text = f"{type(tool).__qualname__}.{method} of tool {name!r} raised {type(error).__name__}: {error}"
            raise EnvError(secrets.redact(text)) from secrets.cause(error)


def parameters_of(tool: BaseTool, key: str) -> tuple[frozenset[str], bool]:
    """Return the parameter names of a key's method (such as ``execute_kwargs``), and whether it takes others."""
    tool_class = type(tool)
    methods: dict[str, Callable[..., Any]] = {
        "create_kwargs": tool_class.create,
        "execute_kwargs": tool_class.execute,
        "calc_reward_kwargs": tool_class.calc_reward,
        "release_kwargs": tool_class.release,
    }
    return _parameters_of(methods[key])


@functools.lru_cache(maxsize=1024)
def _parameters_of(method: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(method).parameters.values()
    return frozenset(parameter.name for parameter in parameters), any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )


_BASE_TOOL_KEYS: tuple[str, ...] = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_FUNCTION_TOOL_KEYS: tuple[str, ...] = ("execute_kwargs",)
_RESERVED_PARAMETERS: frozenset[str] = frozenset(("self", "instance_id", "parameters", "agent_data"))
"""What a tool's methods are given by others than the task."""


def select_tools(tools: Mapping[str, Tool], task: Task | None) -> dict[str, Tool]:
    """Return the tools that a task selects, in the environment's order; by default all.

    The selection is the list of names in ``data["tool_selection"]`` or ``data["extra_info"]["tool_selection"]``; an
    empty one offers no tools. Raises TaskError if it is malformed or names an unknown tool.
    """
    entry = _task_entry(task, "tool_selection")
    if task is None or entry is None:
        return dict(tools)
    where, names = entry
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TaskError(f"{where} is {shown(names)}: it must be a list of tool names")
    _check_known(where, names, tools)
    return {name: tool for name, tool in tools.items() if name in names}


def tools_kwargs(tools: Mapping[str, Tool], task: Task | None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return a task's arguments for tools: by tool name, and then by ``create_kwargs``, ``execute_kwargs``, ...

    They are in ``data["tools_kwargs"]`` or ``data["extra_info"]["tools_kwargs"]``, where a null (of columnar files) is
    no entry. Raises TaskError if they are malformed, name an unknown tool or parameter, or lack a required one.
    """
    entry = _task_entry(task, "tools_kwargs")
    by_tool: dict[str, dict[str, dict[str, Any]]] = {}
    where = "" if task is None else f"task {task.id!r}"
    if entry is not None:
        where, value = entry
        by_tool = _read_kwargs(where, value, tools)
    for name, tool in tools.items():
        if task is not None and isinstance(tool, FunctionTool):
            _check_injected(f"{where}", name, tool, by_tool.get(name, {}).get("execute_kwargs", {}))
    return by_tool


def _task_entry(task: Task | None, key: str) -> tuple[str, Any] | None:
    if task is None:
        return None
    info = task.data.get("extra_info")
    values = {f"data[{key!r}]": task.data.get(key)}
    if isinstance(info, Mapping):
        values[f"data['extra_info'][{key!r}]"] = info.get(key)
    set_values = [(f"task {task.id!r}: {key_path}", value) for key_path, value in values.items() if value is not None]
    if len(set_values) > 1:
        raise TaskError(f"task {task.id!r} sets {' and '.join(values)}: keep one of them")
    return set_values[0] if set_values else None


def _check_known(where: str, names: Any, tools: Mapping[str, Tool]) -> None:
    unknown = [name for name in names if name not in tools]
    if unknown:
        hints = "".join(nearest(name, tools) for name in unknown[:1])
        raise TaskError(
            f"{where} names {', '.join(map(repr, unknown))}{hints}, but the tools are {', '.join(tools) or 'none'}"
        )


def _read_kwargs(where: str, value: Any, tools: Mapping[str, Tool]) -> dict[str, dict[str, dict[str, Any]]]:
    problem = (
        f"{where} is {shown(value)}: it must be an object from tool names to objects such as {{create_kwargs: {{...}}}}"
    )
    if not isinstance(value, Mapping) or not all(
        parts is None or isinstance(parts, Mapping) for parts in value.values()
    ):
        raise TaskError(problem)
    tool_parts = {name: parts for name, parts in value.items() if parts is not None}
    _check_known(where, tool_parts, tools)
    by_tool: dict[str, dict[str, dict[str, Any]]] = {}
    for name, parts in tool_parts.items():
        allowed = _FUNCTION_TOOL_KEYS if isinstance(tools[name], FunctionTool) else _BASE_TOOL_KEYS
        by_tool[name] = {}
        for key, arguments in parts.items():
            if arguments is None:
                continue
            if key not in allowed:
                raise TaskError(
                    f"{where}[{name!r}] has {key!r}{nearest(key, allowed)}: allowed are {', '.join(allowed)}"
                )
            if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
                raise TaskError(f"{where}[{name!r}][{key!r}] is {shown(arguments)}: it must be an object")
            _check_arguments(f"{where}[{name!r}][{key!r}]", tools[name], key, arguments)
            # Copies: the row is shared, and a tool may change what it is given.
            by_tool[name][key] = detached(dict(arguments))
    return by_tool


def _check_arguments(where: str, tool: Tool, key: str, arguments: Mapping[str, Any]) -> None:
    if isinstance(tool, FunctionTool):
        return  # see _check_injected
    names, takes_any = parameters_of(tool, key)
    takes_any = takes_any or key in names
    unknown = [name for name in arguments if name in _RESERVED_PARAMETERS or not (takes_any or name in names)]
    if unknown:
        method = f"{type(tool).__qualname__}.{key.removesuffix('_kwargs')}"
        raise TaskError(
            f"{where} has {', '.join(map(repr, unknown))}, which {method} does not take from a task: it takes "
            f"{', '.join(sorted(names - _RESERVED_PARAMETERS)) or 'nothing'}"
        )


def _check_injected(where: str, name: str, tool: FunctionTool, arguments: Mapping[str, Any]) -> None:
    unknown = [parameter for parameter in arguments if parameter not in tool.injected]
    if unknown:
        allowed = ", ".join(tool.injected) or "none"
        raise TaskError(
            f"{where}[{name!r}]['execute_kwargs'] has {', '.join(map(repr, unknown))}: the Injected parameters of "
            f"{tool.fn.__qualname__} are {allowed}"
        )
    missing = [parameter for parameter, needed in tool.injected.items() if needed and parameter not in arguments]
    if missing:
        raise TaskError(
            f"{where}: the tool {name!r} needs {', '.join(map(repr, missing))}: give it in "
            f"data['tools_kwargs'][{name!r}]['execute_kwargs'], or give the parameter a default"
        )


def load_function_tools(path: str | Path) -> list[FunctionTool]:
    """Return the tools of a Python file, in file order; the file is executed once.

    These are the ``@function_tool`` functions it defines or imports, and all those of modules that it imports as
    modules (``import my_tools``), also if they were imported elsewhere before.

    Raises:
        ConfigError: The file does not exist, raised (the message names the line), or has no tools.
    """
    file = Path(path).expanduser().resolve()
    module = load_file(file, "function_tool_path")
    tools: dict[int, FunctionTool] = {
        id(value): value for value in vars(module).values() if isinstance(value, FunctionTool)
    }
    modules = _imported_modules(module, file)
    registered = (get_tool(name) for name in tool_names())
    tools |= {id(tool): tool for tool in registered if tool.fn.__module__ in modules}
    if not tools:
        raise ConfigError(
            f"function_tool_path: {file} has no tools: write @function_tool above its functions (functions without it "
            "are not offered)"
        )
    return list(tools.values())


def _imported_modules(module: ModuleType, file: Path) -> set[str]:
    """Return the modules that a file imports as modules, at its top level."""
    names = {value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)}
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def load_tool_config(path: str | Path) -> list[BaseTool]:
    """Return new instances of the tools that a YAML file lists.

    The file is ``tools: [{class_name: ..., config: {...}, tool_schema: {...} | null}]``. A class is called with
    ``config=`` and ``tool_schema=`` (OpenAI's form, or None).

    Raises:
        ConfigError: The file is unreadable, has unknown keys, or names a class that cannot be found or constructed; the
            message names file and line.
    """
    file = Path(path).expanduser().absolute()
    entries = load_config(ToolFile, file).tools
    lines = _entry_lines(file)
    make_importable(file.parent)
    locations = [f"{file}:{line}: tools.{n}" for n, line in enumerate(lines)]
    tools = [_make_tool(entry, location) for entry, location in zip(entries, locations, strict=True)]
    check_imported([type(tool) for tool in tools], file.parent)
    return tools


def _entry_lines(file: Path) -> list[int]:
    root: Any = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    entries_node = next(value for key, value in root.value if key.value == "tools")
    return [entry.start_mark.line + 1 for entry in entries_node.value]


def _make_tool(entry: ToolEntry, where: str) -> BaseTool:
    kind = entry.config.get("type", "native")
    if kind != "native":
        remedy = "list the server under tools.mcp of the run's configuration" if kind == "mcp" else "write 'native'"
        raise ConfigError(f"{where}.config.type is {shown(kind)}: only 'native' is supported; {remedy}")
    try:
        tool_class = load_object(entry.class_name, "class_name")
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error
    if not (isinstance(tool_class, type) and issubclass(tool_class, BaseTool)):
        raise ConfigError(
            f"{where}.class_name {entry.class_name!r} is {shown(tool_class)}: it must be a subclass of "
            "turnwise.BaseTool"
        )
    # Read here already: a class may look into what it is given before it calls super().__init__().
    config = with_secrets(entry.config, f"{where}.config")
    secrets = Secrets((), config)
    try:
        schema = None if entry.tool_schema is None else OpenAIFunctionToolSchema.model_validate(entry.tool_schema)
        return tool_class(config=config, tool_schema=schema)
    except (ConfigError, ToolSchemaError) as error:
        raise ConfigError(secrets.redact(f"{where}: {error}")) from secrets.cause(error)
    except Exception as error:  # noqa: BLE001 - a user's class: whatever it raises is named
        text = f"{where}: {entry.class_name} cannot be made with (config=..., tool_schema=...): "
        raise ConfigError(secrets.redact(f"{text}{type(error).__name__}: {error}")) from secrets.cause(error)


def named_tool(entry: str | NamedToolConfig) -> Tool:
    """Return a configured named tool; ConfigError if the name is unknown or the configuration invalid."""
    name, config = (entry, {}) if isinstance(entry, str) else (entry.name, entry.config)
    try:
        if not config:
            return as_tool(name)
        if name not in SHIPPED:
            configurable = ", ".join(SHIPPED)
            raise ConfigError(
                f"tools.named: {name!r} takes no config{nearest(name, SHIPPED)}; tools with a config: {configurable}"
            )
        tool = load_object(SHIPPED[name], "tool")(with_secrets(config, f"tools.named: {name!r}.config"))
    except RegistryError as error:
        raise ConfigError(f"tools.named: {error}") from error
    assert isinstance(tool, BaseTool)
    return tool


def check_names(tools: Iterable[tuple[Tool, str]]) -> list[Tool]:
    """Return (tool, location) pairs without repetitions; raise ConfigError for different tools of one name."""
    by_name: dict[str, dict[int, tuple[Tool, str]]] = {}
    for tool, location in tools:
        by_name.setdefault(tool.name, {}).setdefault(id(tool), (tool, location))
    clashes = {name: list(namesakes.values()) for name, namesakes in by_name.items() if len(namesakes) > 1}
    if clashes:
        lines = [
            f"  {name!r}: {', and '.join(location for _, location in namesakes)}" for name, namesakes in clashes.items()
        ]
        raise ConfigError("several tools have one name: rename or leave out all but one of each\n" + "\n".join(lines))
    return [tool for namesakes in by_name.values() for tool, _ in namesakes.values()]


def location_of(tool: Tool) -> str:
    """Return a tool's source location."""
    if isinstance(tool, FunctionTool):
        code = tool.fn.__code__
        return f"{tool.fn.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return f"{type(tool).__module__}.{type(tool).__qualname__}"


class Toolbox:
    """The configured tools, loaded once and closed once; BaseTool instances are not shared between toolboxes."""

    def __init__(self, config: ToolsConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._loaded: list[Tool] | None = None
        self._lock: asyncio.Lock | None = None

    async def tools(self) -> Sequence[Tool]:
        """Return the tools; the first call loads them and connects to servers. Raises ConfigError or EnvError."""
        if self._loaded is None:
            self._lock = self._lock or asyncio.Lock()
            async with self._lock:
                if self._loaded is None:
                    self._loaded = await self._load()
        return self._loaded

    async def close(self) -> None:
        """Close all connections; idempotent."""
        self._loaded = None
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _load(self) -> list[Tool]:
        config = self._config
        tools: list[tuple[Tool, str]] = [(named_tool(entry), f"tools.named: {entry}") for entry in config.named]
        if config.function_tool_path is not None:
            tools += [(tool, location_of(tool)) for tool in load_function_tools(config.function_tool_path)]
        if config.tool_config_path is not None:
            path = str(config.tool_config_path)
            tools += [(tool, f"{location_of(tool)} of {path}") for tool in load_tool_config(config.tool_config_path)]
        if config.mcp:
            from turnwise.tools.mcp import MCPServer

            for server_config in config.mcp:
                server = MCPServer(server_config)
                self._stack.push_async_callback(server.close)
                tools += [(tool, f"the MCP server {server.name}") for tool in await server.tools()]
        return check_names(tools)
