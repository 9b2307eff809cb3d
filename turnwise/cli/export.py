"""``turnwise export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[Path, typer.Argument(help="A checkpoint of a run, or any folder of a model or an adapter.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not be there, or be empty.")],
) -> None:
    """Write a whole model in Hugging Face format: an adapter is added to its model. For programs that read no other."""
    from turnwise.errors import ConfigError

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already: name another folder, or remove it")
    from turnwise.trainer.policy import load_model

    load_model(source).save_hf(target)
    typer.echo(f"{target}")
