"""Options shared by several commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from turnwise.envs.registration import EnvSpec

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Configuration overrides, as section.key=value.", show_default=False),
]

EnvReference = Annotated[
    str, typer.Argument(help="Registered environment, pkg.mod:Class or file.py:Class.", show_default=False)
]
ConstructorArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Constructor arguments.", show_default=False)
]
EnvTasks = Annotated[str | None, typer.Option("--tasks", "-t", help="Task source; default: the environment's.")]
FunctionTools = Annotated[
    Path | None, typer.Option("--function-tool-path", help="Add the @function_tool functions of this file.")
]
ToolConfig = Annotated[
    Path | None, typer.Option("--tool-config-path", help="Add the BaseTools that this YAML file lists.")
]
MCPServers = Annotated[
    list[str] | None,
    typer.Option("--mcp", help="Add the tools of this MCP server, given as a command line or a URL. Repeatable."),
]


def as_overrides(options: Mapping[str, object], prefix: str = "") -> list[str]:
    """Return the options that are given as overrides of configuration keys."""
    # JSON is YAML, and keeps a text a text whatever it says.
    given_options = {key: value for key, value in options.items() if value is not None}
    return [f"{prefix}{key}={json.dumps(value, default=str)}" for key, value in given_options.items()]


def env_spec(
    env: str, config: list[str] | None, functions: Path | None, file: Path | None, servers: list[str] | None
) -> EnvSpec:
    """Return the environment of a command line, with its additional tools."""
    import shlex

    from turnwise.config import parse_overrides
    from turnwise.envs.registration import EnvSpec

    tools: dict[str, Any] = {}
    if functions is not None:
        tools["function_tool_path"] = str(functions.absolute())
    if file is not None:
        tools["tool_config_path"] = str(file.absolute())
    if servers:
        tools["mcp"] = [
            {"url": server} if server.startswith(("http://", "https://")) else {"command": shlex.split(server)}
            for server in servers
        ]
    return EnvSpec(env, parse_overrides(config or ()), tools)
