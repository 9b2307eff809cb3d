"""``turnwise gateway``."""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from turnwise.cli.options import Overrides


def command(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Directory of a Hugging Face model.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A YAML file to begin with.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="A running server; MODEL then names its tokenizer.")] = None,
    key_env: Annotated[
        str | None,
        typer.Option("--key-env", help="--url is a hosted endpoint: environment variable of its key."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Directory for trajectories, ledger and the admin key.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port to bind; 0 takes a free one.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The model's name; by default the directory's.")] = None,
) -> None:
    """Record any agent that speaks OpenAI Chat, OpenAI Responses or Anthropic Messages, until interrupted."""
    from turnwise.config import load_config
    from turnwise.inference.gateway.config import GatewayConfig

    given = list(overrides or ())
    if model is not None and "=" in model:
        # With --config the model may stand in the file: what looks like an override is one.
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
    from turnwise.inference.gateway.server import GatewaySpec, run_gateway

    if run_gateway(GatewaySpec(config=loaded)) == signal.SIGINT:
        raise KeyboardInterrupt
