"""``turnwise audit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    recompute: Annotated[
        bool, typer.Option(help="Recompute logprobs for the weight versions whose checkpoint exists.")
    ] = True,
    at_most: Annotated[
        int, typer.Option("--at-most", min=1, help="Recompute at most this many turns per weight version.")
    ] = 256,
) -> None:
    """Prove from a run's files that tokens were recorded and trained exactly; exit 1 at a contradiction."""
    from turnwise.trainer.audit import audit_run

    if not audit_run(run, recompute=recompute, at_most=at_most).sound:
        raise typer.Exit(1)
