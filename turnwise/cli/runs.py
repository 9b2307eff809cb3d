"""The commands that read a run's directory: ``view``, ``audit``, ``timeline`` and ``replay``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def view(
    source: Annotated[Path, typer.Argument(help="Run directory, or file of trajectories.", show_default=False)],
    task: Annotated[str | None, typer.Option("--task", help="Only this task.")] = None,
    trajectory: Annotated[str | None, typer.Option("--id", help="Only the trajectory with this id.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Only this partition: train or val.")] = None,
    number: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of trajectories, newest last.")] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also show ids, logprobs and weight versions.")] = False,
) -> None:
    """Show trajectories: messages, tool calls, rewards, forks and stop reasons."""
    from turnwise.evaluation.view import Selection, show

    show(source, Selection(task=task, trajectory=trajectory, partition=partition, number=number), tokens=tokens)


def audit(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    recompute: Annotated[
        bool, typer.Option(help="Recompute logprobs for weight versions with a checkpoint on disk.")
    ] = True,
    at_most: Annotated[
        int, typer.Option("--at-most", min=1, help="Recompute at most this many turns per weight version.")
    ] = 256,
) -> None:
    """Verify from a run's files that tokens were recorded and trained exactly; exit 1 on a contradiction."""
    from turnwise.trainer.run.audit import audit_run

    if not audit_run(run, recompute=recompute, at_most=at_most).sound:
        raise typer.Exit(1)


def timeline(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    part: Annotated[
        int, typer.Option("--part", help="Which process of the run, from 0; -1 is the last one.", show_default=True)
    ] = -1,
    begin: Annotated[float | None, typer.Option("--from", help="Seconds since that process began.")] = None,
    end: Annotated[float | None, typer.Option("--to", help="Seconds since that process began.")] = None,
    width: Annotated[int, typer.Option("--width", min=20, help="Columns of the time axis.")] = 100,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a trace for Perfetto or chrome://tracing to this file instead."),
    ] = None,
) -> None:
    """Draw what ran when: rollouts, the trainer, weights on their way, evaluations and checkpoints."""
    from turnwise.errors import TurnwiseError
    from turnwise.trainer.observe.timeline import Window, draw_text, read_timeline, trace_json

    parts = read_timeline(run / "timeline.jsonl")
    if not -len(parts) <= part < len(parts):
        raise TurnwiseError(f"--part is {part}, but {run} had {len(parts)} processes: 0 is the first, -1 the last")
    window = Window.of(parts[part], (begin, end))
    if trace is None:
        typer.echo("\n".join(draw_text(window, width=width)))
        return
    trace.write_bytes(trace_json(window))
    typer.echo(f"written: {trace}")


def replay(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of an evaluation or a run.", show_default=False)
    ],
    number: Annotated[int | None, typer.Option("--n", "-n", min=1, help="Only the newest N episodes.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="Only episodes of this task.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Compare what the environment says varies (times, paths), too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Play recorded completions against their environments again; exit 1 where a tool, reward or state differs."""
    from turnwise.evaluation.replay.replay import replay_run

    report = replay_run(source, number=number, task=task, strict=strict)
    if as_json:
        differing = [divergence.to_json() for divergence in report.divergences]
        counts = {"episodes": report.episodes, "left_out": report.left_out, "varied": report.varied}
        typer.echo(json.dumps({**counts, "divergences": differing}))
    else:
        for divergence in report.divergences:
            typer.secho(str(divergence), fg="red")
        for reason, count in report.left_out.most_common():
            typer.echo(f"left out: {count} episodes, {reason}")
        for name, count in report.varied.most_common():
            typer.echo(f"varied, as the environment says: {name} in {count} messages")
        typer.echo(f"{report.episodes} episodes replayed, {len(report.divergences)} diverge")
    if report.divergences or not report.episodes:
        raise typer.Exit(1)
