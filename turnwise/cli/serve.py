"""``turnwise serve``."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from turnwise.cli.options import Overrides


def command(
    model: Annotated[Path, typer.Argument(help="A directory with a Hugging Face model.", show_default=False)],
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to bind.")] = None,
    port: Annotated[int, typer.Option("--port", "-p", help="Port to bind; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="The served name; by default the directory's.")] = None,
) -> None:
    """Serve a model until interrupted: /inference/v1/generate, /v1/models, weight updates and the rest."""
    from turnwise.config import load_config
    from turnwise.inference.config import InferenceConfig
    from turnwise.inference.server import ServerSpec, serve

    # JSON is YAML, and keeps a text a text whatever it says.
    options: dict[str, Any] = {"host": host, "port": port}
    said = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    config = load_config(InferenceConfig, overrides=[*said, *(overrides or ())])
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    serve(ServerSpec(model=model.absolute(), name=name, config=config))
