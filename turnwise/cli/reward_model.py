"""``turnwise reward-model``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.options import Overrides


def command(
    config: Annotated[Path, typer.Argument(help="The configuration, a YAML file.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Train a reward model on preferences, for turnwise serve --reward."""
    from turnwise.config import load_config
    from turnwise.trainer.offline.config import RewardModelConfig
    from turnwise.trainer.offline.reward_model import run_reward_model

    run_reward_model(load_config(RewardModelConfig, config, overrides or ()))
