"""``turnwise view``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[Path, typer.Argument(help="A run directory, or a file of trajectories.", show_default=False)],
    task: Annotated[str | None, typer.Option("--task", help="Only this task.")] = None,
    trajectory: Annotated[str | None, typer.Option("--id", help="Only the trajectory with this id.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Only train, or only val.")] = None,
    number: Annotated[int, typer.Option("--n", "-n", min=1, help="How many, the newest last.")] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show ids, logprobs and weight versions too.")] = False,
) -> None:
    """Show trajectories: messages, calls, rewards, forks and how they ended."""
    from turnwise.evaluation.view import Selection, show

    show(source, Selection(task=task, trajectory=trajectory, partition=partition, number=number), tokens=tokens)
