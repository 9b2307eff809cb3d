"""``turnwise mcp``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.options import FunctionTools, MCPServers, ToolConfig, env_spec


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

    from turnwise.envs.mcp_server import EnvServer
    from turnwise.envs.registration import env_class
    from turnwise.errors import TaskError
    from turnwise.tasks import load_tasks

    source = tasks or env_class(env).default_tasks
    rows = None if source is None else load_tasks(source)
    if source is not None and not rows:
        raise TaskError(f"{source}: there is no task in it")
    if task is not None:
        rows = [each for each in rows or () if each.id == task]
        if not rows:
            raise TaskError(
                f"--task {task}: {source or 'the environment has no tasks of its own, so --tasks'} names none"
            )
    spec = env_spec(env, config, functions, tool_config, mcp)

    async def serve() -> None:
        async with spec.toolbox() as toolbox:
            tools = await toolbox.tools()
            spec.make(tools)  # what is wrong with it is said before anybody connects
            server = EnvServer(lambda: spec.make(tools), env, tasks=rows, seed=seed, out=out)
            if http:
                await server.serve_http(host, port, lambda address: typer.echo(f"serving {env} at {address}"))
            else:
                await server.serve_stdio()

    asyncio.run(serve())
