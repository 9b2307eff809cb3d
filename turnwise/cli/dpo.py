"""``turnwise dpo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.options import Overrides


def command(
    config: Annotated[Path, typer.Argument(help="The configuration, a YAML file.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Train a model on preferences (direct preference optimisation)."""
    from turnwise.config import load_config
    from turnwise.trainer.offline.config import DPOConfig
    from turnwise.trainer.offline.dpo import run_dpo

    run_dpo(load_config(DPOConfig, config, overrides or ()))
