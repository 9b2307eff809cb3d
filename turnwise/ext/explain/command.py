"""The command ``turnwise explain``: why a run does not learn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.options import CommandResult


def explain(
    run: Annotated[Path, typer.Argument(help="Directory of a training run.", show_default=False)],
    number: Annotated[int | None, typer.Option("--n", "-n", min=1, help="Most findings; by default all.")] = None,
) -> CommandResult:
    """Say what holds learning back: the first cause first, with evidence and the keys to change."""
    from rich.console import Console

    from turnwise.ext.explain.explain import explain_run, show_explanation

    explanation = explain_run(run)
    show_explanation(explanation, Console(), number)
    return CommandResult(explanation.to_json())
