"""The commands that serve: ``turnwise serve``, ``gateway`` and ``runner``."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from turnwise.cli.options import Overrides, as_overrides


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

    keys = [*as_overrides({"host": host, "port": port}), *(overrides or ())]
    if reward:
        settings = load_config(RewardServerConfig, overrides=keys)
        _log_to_terminal(settings.log_level)
        from turnwise.engine.reward_model import serve_reward
        from turnwise.inference.builtin import RewardServerSpec

        serve_reward(RewardServerSpec(model=model.absolute(), name=name, config=settings))
        return
    config = load_config(ServeConfig, overrides=keys)
    _log_to_terminal(config.log_level)
    if not config.builtin:
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

    keys = list(overrides or ())
    if model is not None and "=" in model:
        # With --config the file may name the model, so the first argument can already be an override.
        keys, model = [model, *keys], None
    options: dict[str, Any] = {
        "model": model,
        "url": url,
        "hosted.key_env": key_env,
        "out": out,
        "host": host,
        "port": port,
        "name": name,
    }
    loaded = load_config(GatewayConfig, config, [*as_overrides(options), *keys])
    _log_to_terminal(loaded.log_level)
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
    local_agent = make_agent(agent, **parse_overrides(config or ()))
    options = RunnerOptions(connect.rstrip("/"), read_key(key_file), concurrency, wait, stay)
    asyncio.run(serve_run(options, local_agent, lambda text: print(text, file=sys.stderr, flush=True)))  # noqa: T201
