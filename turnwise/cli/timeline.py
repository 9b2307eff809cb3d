"""``turnwise timeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
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
    from turnwise.trainer.timeline import read_timeline
    from turnwise.trainer.timeline_drawing import Window, draw_svg, draw_text

    parts = read_timeline(run / "timeline.jsonl")
    if not -len(parts) <= part < len(parts):
        raise TurnwiseError(f"--part is {part}, but {run} had {len(parts)} processes: 0 is the first, -1 the last")
    window = Window.of(parts[part], (begin, end))
    if svg is None:
        typer.echo("\n".join(draw_text(window, width=width)))
        return
    svg.write_text(draw_svg(window), encoding="utf-8")
    typer.echo(f"written: {svg}")
