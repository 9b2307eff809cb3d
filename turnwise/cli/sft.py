"""``turnwise sft``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.options import Overrides


def command(
    config: Annotated[Path, typer.Argument(help="The configuration, a YAML file.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Fine-tune a model on demonstrations, or on recorded trajectories (rejection sampling)."""
    from turnwise.config import load_config
    from turnwise.trainer.offline.config import SFTConfig
    from turnwise.trainer.offline.sft import run_sft

    run_sft(load_config(SFTConfig, config, overrides or ()))
