"""``turnwise train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.options import Overrides


def command(
    config: Annotated[Path, typer.Argument(help="The configuration, a YAML file.", show_default=False)],
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove an earlier run of this name first.")] = False,
) -> None:
    """Train a policy with reinforcement learning; goes on from the last checkpoint where there is one."""
    from turnwise.config import load_config
    from turnwise.trainer.config import TrainConfig
    from turnwise.trainer.train import run_train

    run_train(load_config(TrainConfig, config, overrides or ()), fresh=fresh)
