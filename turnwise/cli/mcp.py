"""``turnwise mcp``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.options import FunctionTools, MCPServers, ToolConfig, env_spec

if TYPE_CHECKING:
    from turnwise.tasks import Task, TaskSource


def command(
    env: Annotated[str, typer.Argument(help="A registered name, pkg.mod:Class or file.py:Class.", show_default=False)],
    config: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of its constructor.", show_default=False),
    ] = None,
    http: Annotated[
        bool,
        typer.Option("--http/--stdio", help="Serve any number of clients over HTTP, or one over stdin and stdout."),
    ] = False,
    host: Annotated[str, typer.Option("--host", help="Address to bind, with --http.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port to bind; 0 takes a free one.")] = 8000,
    tasks: Annotated[
        str | None, typer.Option("--tasks", "-t", help="Tasks of the episodes, in order; by default its own.")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Only the task with this id.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of every reset; by default the task's own.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Append a line of JSON per episode to this file.")
    ] = None,
    functions: FunctionTools = None,
    tool_config: ToolConfig = None,
    mcp: MCPServers = None,
) -> None:
    """Serve an environment's tools as an MCP server: each session of a client plays one episode, which is scored."""
    import asyncio
    import sys
    from contextlib import AbstractContextManager, nullcontext, redirect_stdout

    from turnwise.envs.mcp_server import EnvServer
    from turnwise.envs.registration import env_class

    def apart() -> AbstractContextManager[object]:
        # Over stdio, what the environment's code prints must not come between the messages.
        return nullcontext() if http else redirect_stdout(sys.stderr)

    with apart():
        queue = _queue(env_class(env).default_tasks if tasks is None else tasks, task)
    spec = env_spec(env, config, functions, tool_config, mcp)

    async def serve() -> None:
        async with spec.toolbox() as toolbox:
            with apart():
                tools = await toolbox.tools()
                spec.make(tools)  # what is wrong with it is said before anybody connects
            server = EnvServer(lambda: spec.make(tools), env, tasks=queue, seed=seed, out=out)
            if http:
                await server.serve_http(host, port, lambda address: typer.echo(f"serving {env} at {address}"))
            else:
                await server.serve_stdio()

    asyncio.run(serve())


def _queue(source: TaskSource | None, task: str | None) -> Iterable[Task] | None:
    """Return the tasks of the sessions, in order. They are read as sessions come: there may be no end to them."""
    from itertools import chain

    from turnwise.errors import TaskError
    from turnwise.tasks import iter_tasks

    rows = iter(()) if source is None else iter_tasks(source)
    if task is not None:
        found = next((each for each in rows if each.id == task), None)
        if found is None:
            where = source or "the environment has no tasks of its own, so --tasks"
            raise TaskError(f"--task {task}: {where} names none")
        return [found]
    first = next(rows, None)
    if first is None and source is not None:
        raise TaskError(f"{source}: there is no task in it")
    return None if first is None else chain([first], rows)
