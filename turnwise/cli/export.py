"""``turnwise export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[Path, typer.Argument(help="A run, a checkpoint of one, or any folder of a model or an adapter.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not be there, or be empty.")],
    step: Annotated[
        int | None, typer.Option("--step", help="Of a run: the checkpoint of this step, not the newest.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Of a run: the best checkpoint (checkpoint.best).")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone, for peft.")] = False,
) -> None:
    """Write a whole model in Hugging Face format: an adapter is added to its model. For programs that read no other."""
    from turnwise.trainer.export import export_model

    folder = export_model(source, target, step=step, best=best, adapter=adapter)
    typer.echo(f"{target} (of {folder})")
