"""The commands that serve: ``turnwise serve``, ``gateway``, ``runner`` and ``mcp``."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnwise.cli.options import (
    ConstructorArguments,
    EnvReference,
    FunctionTools,
    MCPServers,
    Overrides,
    ToolConfig,
    env_spec,
)

if TYPE_CHECKING:
    from turnwise.tasks.core import Task
    from turnwise.tasks.sources import TaskSource


def serve(
    model: Annotated[Path, typer.Argument(help="Directory of a Hugging Face model.", show_default=False)],
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to bind.")] = None,
    port: Annotated[int, typer.Option("--port", "-p", help="Port to bind; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="Served model name; default: the directory's.")] = None,
    reward: Annotated[bool, typer.Option("--reward", help="Serve a sequence classifier at POST /classify.")] = False,
) -> None:
    """Serve a model until interrupted: generation at /inference/v1/generate, /v1/models, weight updates, control."""
    from turnwise.config import load_config
    from turnwise.inference.config import RewardServerConfig, ServeConfig

    # JSON is YAML, and keeps a text a text whatever it says.
    options: dict[str, Any] = {"host": host, "port": port}
    said = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    given = [*said, *(overrides or ())]
    if reward:
        settings = load_config(RewardServerConfig, overrides=given)
        _log_to_terminal(settings.log_level)
        from turnwise.engine.reward_model import serve_reward
        from turnwise.inference.builtin import RewardServerSpec

        serve_reward(RewardServerSpec(model=model.absolute(), name=name, config=settings))
        return
    config = load_config(ServeConfig, overrides=given)
    _log_to_terminal(config.log_level)
    if config.engine != "builtin":
        import asyncio
        from datetime import datetime

        from turnwise.inference.engines import serve_replica

        folder = Path("runs").absolute() / f"serve-{name or model.name}-{datetime.now():%Y%m%d-%H%M%S}"
        asyncio.run(serve_replica(model.absolute(), config, name=name, log_file=folder / "server.log"))
        return
    from turnwise.engine.server import ServerSpec, serve

    serve(ServerSpec(model=model.absolute(), name=name, config=config))


def _log_to_terminal(level: str) -> None:
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format=form)


def gateway(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Directory of a Hugging Face model.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML configuration file.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="URL of a running server; MODEL names its tokenizer.")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option("--key-env", help="Environment variable with the API key of a hosted --url.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Directory for trajectories, ledger and the admin key.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port to bind; 0 takes a free one.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Served model name; default: the directory's.")] = None,
) -> None:
    """Run a gateway that records any agent over OpenAI Chat, OpenAI Responses or Anthropic Messages."""
    from turnwise.config import load_config
    from turnwise.gateway.config import GatewayConfig

    given = list(overrides or ())
    if model is not None and "=" in model:
        # With --config the file may name the model, so the first argument can already be an override.
        given, model = [model, *given], None
    options: dict[str, Any] = {
        "model": model,
        "url": url,
        "hosted.key_env": key_env,
        "out": out,
        "host": host,
        "port": port,
        "name": name,
    }
    # JSON is YAML, and keeps a text a text whatever it says.
    said = [f"{key}={json.dumps(value, default=str)}" for key, value in options.items() if value is not None]
    loaded = load_config(GatewayConfig, config, [*said, *given])
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=loaded.log_level.upper(), stream=sys.stderr, format=form)
    from turnwise.gateway.server import GatewaySpec, run_gateway

    if run_gateway(GatewaySpec(config=loaded)) == signal.SIGINT:
        raise KeyboardInterrupt


def runner(
    agent: Annotated[str, typer.Option("--agent", help="Registered agent, pkg.mod:Name or file.py:Name.")],
    connect: Annotated[str, typer.Option("--connect", help="URL that the run prints.")],
    key_file: Annotated[Path, typer.Option("--key-file", help="Copy of the run's rollout.remote.key_file.")],
    config: Annotated[
        list[str] | None, typer.Option("--config", "-c", help="Agent configuration, key=value. Repeatable.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-n", min=1, help="Number of concurrent episodes.")] = 8,
    wait: Annotated[
        float | None, typer.Option("--wait", min=0, help="Exit after this many seconds without a run.")
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for the next run when one ends.")] = False,
) -> None:
    """Run episodes of a remote training or evaluation run with an agent on this machine."""
    import asyncio
    import sys

    from turnwise.agents.registry import make_agent
    from turnwise.config import parse_overrides
    from turnwise.errors import ConfigError
    from turnwise.gateway.endpoints import check_base
    from turnwise.rollout.remote.runner import RunnerOptions, read_key, serve_run

    try:
        check_base(connect)
    except ConfigError as error:
        raise ConfigError(f"--connect: {error}") from error
    made = make_agent(agent, **parse_overrides(config or ()))
    options = RunnerOptions(connect.rstrip("/"), read_key(key_file), concurrency, wait, stay)
    asyncio.run(serve_run(options, made, lambda text: print(text, file=sys.stderr, flush=True)))  # noqa: T201


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

    from turnwise.envs.mcp_server import EnvServer
    from turnwise.envs.registration import own_tasks

    def stdout_to_stderr() -> AbstractContextManager[object]:
        # Over stdio, what the environment's code prints must not come between the messages.
        return nullcontext() if http else redirect_stdout(sys.stderr)

    with stdout_to_stderr():
        spec = env_spec(env, config, functions, tool_config, mcp)
        queue = _queue(own_tasks(env, spec.config) if tasks is None else tasks, task)

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


def _queue(source: TaskSource | None, task: str | None) -> Iterable[Task] | None:
    """Return the tasks of successive sessions, read lazily: the source may be endless."""
    from itertools import chain

    from turnwise.errors import TaskError
    from turnwise.tasks.reader import iter_tasks

    rows = iter(()) if source is None else iter_tasks(source)
    if task is not None:
        found = next((each for each in rows if each.id == task), None)
        if found is None:
            where = f"{source} has no task with this id"
            if source is None:
                where = "the environment has no default_tasks: name a source with --tasks"
            raise TaskError(f"--task {task}: {where}")
        return [found]
    first = next(rows, None)
    if first is None and source is not None:
        raise TaskError(f"{source}: it contains no tasks")
    return None if first is None else chain([first], rows)
