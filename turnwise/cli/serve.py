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
    reward: Annotated[bool, typer.Option("--reward", help="Serve a sequence classifier: POST /classify.")] = False,
) -> None:
    """Serve a model until interrupted: /inference/v1/generate, /v1/models, weight updates and the rest."""
    from turnwise.config import load_config
    from turnwise.inference.config import InferenceConfig, RewardServerConfig

    # JSON is YAML, and keeps a text a text whatever it says.
    options: dict[str, Any] = {"host": host, "port": port}
    said = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    given = [*said, *(overrides or ())]
    if reward:
        settings = load_config(RewardServerConfig, overrides=given)
        _log_to_terminal(settings.log_level)
        from turnwise.inference.reward_process import RewardServerSpec
        from turnwise.inference.reward_server import serve_reward

        serve_reward(RewardServerSpec(model=model.absolute(), name=name, config=settings))
        return
    config = load_config(InferenceConfig, overrides=given)
    _log_to_terminal(config.log_level)
    from turnwise.inference.server import ServerSpec, serve

    serve(ServerSpec(model=model.absolute(), name=name, config=config))


def _log_to_terminal(level: str) -> None:
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format=form)
