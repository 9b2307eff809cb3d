"""``turnwise eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from turnwise.cli.options import Overrides


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
    from turnwise.evaluation.runner import run_eval

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
    run_eval(load_config(EvalConfig, config, [*said, *given]))
