"""``turnwise view``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
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


def audit(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    recompute: Annotated[
        bool, typer.Option(help="Recompute logprobs for the weight versions whose checkpoint exists.")
    ] = True,
    at_most: Annotated[
        int, typer.Option("--at-most", min=1, help="Recompute at most this many turns per weight version.")
    ] = 256,
) -> None:
    """Prove from a run's files that tokens were recorded and trained exactly; exit 1 at a contradiction."""
    from turnwise.trainer.observe.audit import audit_run

    if not audit_run(run, recompute=recompute, at_most=at_most).sound:
        raise typer.Exit(1)


def timeline(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    part: Annotated[
        int, typer.Option("--part", help="Which process of the run, from 0; -1 is the last one.", show_default=True)
    ] = -1,
    begin: Annotated[float | None, typer.Option("--from", help="Seconds since that process began.")] = None,
    end: Annotated[float | None, typer.Option("--to", help="Seconds since that process began.")] = None,
    width: Annotated[int, typer.Option("--width", min=20, help="Columns of the time axis.")] = 100,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture to this file instead.")] = None,
) -> None:
    """Draw what ran when: rollouts, the trainer, weights on their way, evaluations and checkpoints."""
    from turnwise.errors import TurnwiseError
    from turnwise.trainer.observe.timeline import read_timeline
    from turnwise.trainer.observe.timeline_drawing import Window, draw_svg, draw_text

    parts = read_timeline(run / "timeline.jsonl")
    if not -len(parts) <= part < len(parts):
        raise TurnwiseError(f"--part is {part}, but {run} had {len(parts)} processes: 0 is the first, -1 the last")
    window = Window.of(parts[part], (begin, end))
    if svg is None:
        typer.echo("\n".join(draw_text(window, width=width)))
        return
    svg.write_text(draw_svg(window), encoding="utf-8")
    typer.echo(f"written: {svg}")
