"""Options shared by several commands."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead; what else is printed goes to stderr.")]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    Attributes:
        values: JSON values; others, such as paths, become texts.
        failed: Whether the command exits with 1.
    """

    values: Any
    failed: bool = False


def with_json(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with ``--json``, which prints its CommandResult; what it prints itself goes to stderr then.

    A command that prints less for it may have the parameter ``as_json`` itself. One without a CommandResult is left as
    it is.
    """
    signature = inspect.signature(command, eval_str=True)
    if signature.return_annotation is not CommandResult:
        return command
    knows = "as_json" in signature.parameters

    @functools.wraps(command)
    def run(*, as_json: bool = False, **arguments: Any) -> None:
        if knows:
            arguments["as_json"] = as_json
        with _stdout_to_stderr() if as_json else contextlib.nullcontext():
            result = command(**arguments)
        if as_json:
            typer.echo(json.dumps(result.values, default=str))
        if result.failed:
            raise typer.Exit(1)

    option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
    parameters = [*signature.parameters.values(), *(() if knows else (option,))]
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect the block's output, also that of processes which it starts."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


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
