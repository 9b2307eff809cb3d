"""The commands ``export-env``, ``mcp``, ``mcp-runs`` and ``convert-config``: to and from others' programs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from turnwise.cli.options import (
    AsJson,
    CommandResult,
    ConstructorArguments,
    EnvReference,
    EnvTasks,
    FunctionTools,
    MCPServers,
    ToolConfig,
    env_spec,
)

if TYPE_CHECKING:
    from turnwise.tasks.core import Task
    from turnwise.tasks.sources import TaskSource


def export_env(
    env: EnvReference,
    config: ConstructorArguments = None,
    *,
    form: Annotated[
        str, typer.Option("--as", help="gymnasium, inspect, mcp, openenv or verifiers.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write; by default NAME-FRAMEWORK.", show_default=False)
    ] = None,
    tasks: EnvTasks = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of tasks.")] = 1_000,
) -> CommandResult:
    """Write a folder with an environment and its tasks, for Gymnasium, Inspect, MCP clients, OpenEnv or verifiers."""
    import asyncio

    from turnwise.ext.frameworks.export import export_env as write

    folder = out or Path(f"{Path(env.rpartition(':')[2]).stem}-{form}")
    files = asyncio.run(write(env_spec(env, config, None, None, None), form, folder, tasks=tasks, limit=limit))
    typer.echo(f"{len(files)} files in {folder}: see {folder / 'README.md'}")
    return CommandResult({"folder": folder, "files": files})


def mcp(
    env: EnvReference,
    config: ConstructorArguments = None,
    http: Annotated[
        bool, typer.Option("--http/--stdio", help="Serve many clients over HTTP, or one over stdin and stdout.")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="Address to bind, with --http.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port to bind; 0 takes a free one.")] = 8000,
    tasks: Annotated[
        str | None, typer.Option("--tasks", "-t", help="Task source, played in order; default: the environment's.")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Play only the task with this id.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of every reset; default: the task's.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Append one JSON line per episode to this file.")
    ] = None,
    functions: FunctionTools = None,
    tool_config: ToolConfig = None,
    mcp: MCPServers = None,
) -> None:
    """Serve an environment's tools as an MCP server; each client session plays and scores one episode."""
    import asyncio
    import sys
    from contextlib import AbstractContextManager, nullcontext, redirect_stdout

    from turnwise.envs.registration import default_task_source
    from turnwise.ext.frameworks.mcp_server import EnvServer

    def stdout_to_stderr() -> AbstractContextManager[object]:
        # Over stdio, what the environment's code prints must not come between the messages.
        return nullcontext() if http else redirect_stdout(sys.stderr)

    with stdout_to_stderr():
        spec = env_spec(env, config, functions, tool_config, mcp)
        queue = _queue(default_task_source(env, spec.config) if tasks is None else tasks, task)

    async def serve() -> None:
        async with spec.toolbox() as toolbox:
            with stdout_to_stderr():
                tools = await toolbox.tools()
                spec.make(tools)  # raises before a client connects
            server = EnvServer(lambda: spec.make(tools), env, tasks=queue, seed=seed, out=out)
            if http:
                await server.serve_http(host, port, lambda address: typer.echo(f"serving {env} at {address}"))
            else:
                await server.serve_stdio()

    asyncio.run(serve())


def mcp_runs(
    folder: Annotated[Path, typer.Argument(help="Folder whose runs are served.")] = Path(),
    allow: Annotated[
        Literal["start"] | None, typer.Option("--allow", help="Let clients start and stop runs, and run models.")
    ] = None,
    http: Annotated[
        bool, typer.Option("--http/--stdio", help="Serve many clients over HTTP, or one over stdin and stdout.")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="Address to bind, with --http.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port to bind; 0 takes a free one.")] = 8000,
) -> None:
    """Serve the runs of a folder as an MCP server: coding agents read, explain and, where allowed, start them."""
    import asyncio

    from turnwise.errors import ConfigError
    from turnwise.ext.frameworks.mcp_server import serve_http, serve_stdio
    from turnwise.ext.frameworks.runs_server import RunTools, create_server
    from turnwise.inference.guard.turnwise_guard import is_loopback

    if http and allow is not None and not is_loopback(host):
        raise ConfigError(f"--host is {host}, where others could start runs: bind 127.0.0.1, or omit --allow")
    tools = RunTools(folder, may_start=allow == "start")
    server = create_server(tools)
    if http:
        app = server.streamable_http_app(host=host)
        served = f"serving the runs of {folder} at"
        asyncio.run(serve_http(app, host, port, lambda address: typer.echo(f"{served} {address}"), tools.close))
    else:
        asyncio.run(serve_stdio(server, tools.close))


def _queue(source: TaskSource | None, task: str | None) -> Iterable[Task] | None:
    """Return the tasks of successive sessions, read lazily: the source may be endless."""
    from itertools import chain

    from turnwise.errors import TaskError
    from turnwise.tasks.reader import iter_tasks

    rows = iter(()) if source is None else iter_tasks(source)
    if task is not None:
        match = next((row for row in rows if row.id == task), None)
        if match is None:
            where = f"{source} has no task with this id"
            if source is None:
                where = "the environment has no default_tasks: name a source with --tasks"
            raise TaskError(f"--task {task}: {where}")
        return [match]
    first = next(rows, None)
    if first is None and source is not None:
        raise TaskError(f"{source}: it contains no tasks")
    return None if first is None else chain([first], rows)


def convert_config(
    source: Annotated[
        list[str],
        typer.Argument(
            help="A shell script, a resolved YAML file, or the options of a command after --.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; by default stdout.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> CommandResult:
    """Translate a command of verl into a configuration, and list the options that have no counterpart.

    A shell script runs with every program replaced by one that does nothing, and with this process's variables.
    """
    from turnwise.ext.frameworks.convert.agent_lightning import translate_agent_lightning
    from turnwise.ext.frameworks.convert.options import read_options
    from turnwise.ext.frameworks.convert.verl_running import translate_verl

    settings = read_options(source)
    translate = translate_agent_lightning if "agentlightning.local.agent_class" in settings else translate_verl
    translation = translate(settings)
    if out is not None:
        out.write_text(translation.yaml(), encoding="utf-8")
    elif not as_json:
        typer.echo(translation.yaml())
    for title, options in () if as_json else translation.report().items():
        typer.echo(f"{title} ({len(options)}):", err=True)
        for option, text in options.items():
            typer.echo(f"  {option}: {text}", err=True)
    return CommandResult({"config": translation.config, **translation.report()})
