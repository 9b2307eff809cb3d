"""Tools that a configuration names: from a Python file, from a YAML file, from MCP servers."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import yaml

from turnwise.config import load_config
from turnwise.errors import ConfigError, RegistryError, ToolSchemaError, shown
from turnwise.plugins import load_file, load_object
from turnwise.tools.config import NamedToolConfig, ToolEntry, ToolFile, ToolsConfig
from turnwise.tools.core import SHIPPED, BaseTool, FunctionTool, Tool, as_tool, get_tool, nearest, tool_names
from turnwise.tools.schema import OpenAIFunctionToolSchema
from turnwise.tools.secrets import Secrets, with_secrets


def load_function_tools(path: str | Path) -> list[FunctionTool]:
    """Return the tools of a Python file, in the order in which the file has them.

    These are the ``@function_tool`` functions that its names stand for, whether it defines or imports them, and all
    those of modules that it imports as modules (``import my_tools``). Whether something else imported them before
    changes nothing. The file is run once, however often it is loaded.

    Raises:
        ConfigError: There is no such file, running it failed (the message names the line), or it has no tools.
    """
    file = Path(path).expanduser().resolve()
    module = load_file(file, "function_tool_path")
    found: dict[int, FunctionTool] = {
        id(value): value for value in vars(module).values() if isinstance(value, FunctionTool)
    }
    modules = _imported_modules(module, file)
    registered = (get_tool(name) for name in tool_names())
    found |= {id(tool): tool for tool in registered if tool.fn.__module__ in modules}
    if not found:
        raise ConfigError(
            f"function_tool_path: {file} has no tools: write @function_tool above its functions (functions without it "
            "are not offered)"
        )
    return list(found.values())


def _imported_modules(module: ModuleType, file: Path) -> set[str]:
    """Return the names of the modules that a file imports as modules, at its top level."""
    names = {value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)}
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def load_tool_config(path: str | Path) -> list[BaseTool]:
    """Return the tools that a YAML file lists, each made anew.

    The file is ``tools: [{class_name: ..., config: {...}, tool_schema: {...} | null}]``. A class is made with
    ``config=`` and ``tool_schema=`` (OpenAI's form, or None).

    Raises:
        ConfigError: The file cannot be read, has unknown keys, or names a class that cannot be found or made; the
            message names file and line.
    """
    file = Path(path).expanduser().absolute()
    entries = load_config(ToolFile, file).tools
    lines = _entry_lines(file)
    return [
        _made(entry, f"{file}:{line}: tools.{n}") for n, (entry, line) in enumerate(zip(entries, lines, strict=True))
    ]


def _entry_lines(file: Path) -> list[int]:
    """Return the line at which each entry of ``tools`` begins."""
    root: Any = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    listed = next(value for key, value in root.value if key.value == "tools")
    return [item.start_mark.line + 1 for item in listed.value]


def _made(entry: ToolEntry, where: str) -> BaseTool:
    kind = entry.config.get("type", "native")
    if kind != "native":
        remedy = "list the server under tools.mcp of the run's configuration" if kind == "mcp" else "write 'native'"
        raise ConfigError(f"{where}.config.type is {shown(kind)}: only 'native' is known here; {remedy}")
    try:
        found = load_object(entry.class_name, "class_name")
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error
    if not (isinstance(found, type) and issubclass(found, BaseTool)):
        raise ConfigError(
            f"{where}.class_name {entry.class_name!r} is {shown(found)}: it must be a subclass of turnwise.BaseTool"
        )
    # Read here already: a class may look into what it is given before it calls super().__init__().
    config = with_secrets(entry.config, f"{where}.config")
    secrets = Secrets((), config)
    try:
        schema = None if entry.tool_schema is None else OpenAIFunctionToolSchema.model_validate(entry.tool_schema)
        return found(config=config, tool_schema=schema)
    except (ConfigError, ToolSchemaError) as error:
        raise ConfigError(secrets.redact(f"{where}: {error}")) from secrets.cause(error)
    except Exception as error:  # noqa: BLE001 - a class of the user's: whatever it raises is named
        text = f"{where}: {entry.class_name} cannot be made with (config=..., tool_schema=...): "
        raise ConfigError(secrets.redact(f"{text}{type(error).__name__}: {error}")) from secrets.cause(error)


def named_tool(item: str | NamedToolConfig) -> Tool:
    """Return the tool that a configuration names.

    Raises:
        ConfigError: There is none of this name, or it does not take its configuration.
    """
    name, config = (item, {}) if isinstance(item, str) else (item.name, item.config)
    try:
        if not config:
            return as_tool(name)
        if name not in SHIPPED:
            known = ", ".join(SHIPPED)
            raise ConfigError(
                f"tools.named: {name!r} takes no config{nearest(name, SHIPPED)}: those that do are {known}"
            )
        made = load_object(SHIPPED[name], "tool")(with_secrets(config, f"tools.named: {name!r}.config"))
    except RegistryError as error:
        raise ConfigError(f"tools.named: {error}") from error
    assert isinstance(made, BaseTool)
    return made


def check_names(tools: Iterable[tuple[Tool, str]], error: type[Exception] = ConfigError) -> list[Tool]:
    """Return tools without repetitions.

    Args:
        tools: Each with the place it comes from.
        error: What to raise.

    Raises:
        Exception: Different tools have one name; all such names are listed, with their places.
    """
    named: dict[str, dict[int, tuple[Tool, str]]] = {}
    for tool, place in tools:
        named.setdefault(tool.name, {}).setdefault(id(tool), (tool, place))
    taken = {name: list(found.values()) for name, found in named.items() if len(found) > 1}
    if taken:
        lines = [f"  {name!r}: {', and '.join(place for _, place in found)}" for name, found in taken.items()]
        raise error("several tools have one name: rename or leave out all but one of each\n" + "\n".join(lines))
    return [tool for found in named.values() for tool, _ in found.values()]


def place_of(tool: Tool) -> str:
    """Return where a tool is written."""
    if isinstance(tool, FunctionTool):
        code = tool.fn.__code__
        return f"{tool.fn.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return f"{type(tool).__module__}.{type(tool).__qualname__}"


class Toolbox:
    """The tools that a configuration names, loaded once and closed once.

    An object of its own loads its own BaseTools; the functions of a file are the same ones everywhere.

    Args:
        config: Where they come from.
    """

    def __init__(self, config: ToolsConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._loaded: list[Tool] | None = None
        self._lock: asyncio.Lock | None = None

    async def tools(self) -> Sequence[Tool]:
        """Return the tools; the first call loads them and connects to the servers.

        Raises:
            ConfigError: Something cannot be loaded, or names collide.
            EnvError: An MCP server cannot be reached.
        """
        if self._loaded is None:
            self._lock = self._lock or asyncio.Lock()
            async with self._lock:
                if self._loaded is None:
                    self._loaded = await self._load()
        return self._loaded

    async def close(self) -> None:
        """Close what was opened. A second time is no error."""
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
        found: list[tuple[Tool, str]] = [(named_tool(item), f"tools.named: {item}") for item in config.named]
        if config.function_tool_path is not None:
            found += [(tool, place_of(tool)) for tool in load_function_tools(config.function_tool_path)]
        if config.tool_config_path is not None:
            place = str(config.tool_config_path)
            found += [(tool, f"{place_of(tool)} of {place}") for tool in load_tool_config(config.tool_config_path)]
        if config.mcp:
            from turnwise.tools.mcp import MCPServer

            for server_config in config.mcp:
                server = MCPServer(server_config)
                self._stack.push_async_callback(server.close)
                found += [(tool, f"the MCP server {server.name}") for tool in await server.tools()]
        return check_names(found)
