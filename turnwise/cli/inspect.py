"""``turnwise eval``, ``view``, ``audit`` and ``timeline``: to measure a model, and to look into what a run left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from turnwise.cli.options import Overrides


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
    from turnwise.trainer.observe.timeline import Window, draw_svg, draw_text, read_timeline

    parts = read_timeline(run / "timeline.jsonl")
    if not -len(parts) <= part < len(parts):
        raise TurnwiseError(f"--part is {part}, but {run} had {len(parts)} processes: 0 is the first, -1 the last")
    window = Window.of(parts[part], (begin, end))
    if svg is None:
        typer.echo("\n".join(draw_text(window, width=width)))
        return
    svg.write_text(draw_svg(window), encoding="utf-8")
    typer.echo(f"written: {svg}")


def evaluate(
    env: Annotated[
        str | None,
        typer.Argument(metavar="ENV", help="A registered name, pkg.mod:Class or file.py:Class.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A YAML file to begin with.")] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="Directory of a Hugging Face model.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="A running server; --model then names its tokenizer.")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option("--key-env", help="--url is a hosted endpoint: environment variable of its key.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", "-t", help="A file of tasks, or pkg.mod:function?key=value.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Take only so many tasks.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", "-n", help="Episodes per task.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Of the sampled episodes.")] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--no-greedy", help="Also one episode per task at temperature 0.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Who acts.")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Episodes at the same time.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory for trajectories and summary.")] = None,
) -> None:
    """Evaluate a model on an environment: success with its standard error, turns, tool errors, ends."""
    from turnwise.config import load_config
    from turnwise.evaluation.config import EvalConfig
    from turnwise.inference.builtin import forked_servers

    given = list(overrides or ())
    if env is not None and "=" in env:
        # With --config the environment may stand in the file: what looks like an override is one.
        given, env = [env, *given], None
    options: dict[str, Any] = {
        "rollout.env.name": env,
        "rollout.agent.name": agent,
        "rollout.temperature": temperature,
        "rollout.concurrency": concurrency,
        "model": model,
        "url": url,
        "hosted.key_env": key_env,
        "tasks": tasks,
        "limit": limit,
        "samples": samples,
        "greedy": greedy,
        "out": out,
    }
    # JSON is YAML, and keeps a text a text whatever it says.
    said = [f"{key}={json.dumps(value, default=str)}" for key, value in options.items() if value is not None]
    checked = load_config(EvalConfig, config, [*said, *given])
    # The servers import while this process reads its tasks.
    with forked_servers(0 if checked.url is not None else checked.inference.replicas):
        from turnwise.evaluation.runner import run_eval

        run_eval(checked)
