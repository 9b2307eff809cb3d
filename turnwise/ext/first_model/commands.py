"""The commands ``turnwise make-model`` and ``turnwise demos``, which use an environment's reference solution."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.options import CommandResult, ConstructorArguments, EnvReference, EnvTasks, env_spec


def make_model(
    directory: Annotated[Path, typer.Argument(help="Where the model is written.", show_default=False)],
    env: Annotated[
        str, typer.Option("--env", help="Registered environment, pkg.mod:Class or file.py:Class.", show_default=False)
    ],
    config: ConstructorArguments = None,
    tasks: EnvTasks = None,
    demonstrations: Annotated[int, typer.Option("--demonstrations", min=1, help="Number of solved tasks.")] = 800,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Steps of the warm start; 0 for random weights.")] = 120,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights, episodes and order.")] = 0,
    width: Annotated[int, typer.Option("--width", min=32, help="Hidden size, a multiple of 16.")] = 128,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Number of layers.")] = 4,
    wrong: Annotated[
        float,
        typer.Option("--wrong", min=0, max=1, help="Share of demonstrations with another one's answer: room to train."),
    ] = 0.4,
) -> CommandResult:
    """Make a small model with its tokenizer for an environment, from the environment's reference solutions."""
    import asyncio

    from turnwise.errors import ConfigError

    if width % 16:
        raise ConfigError(f"--width is {width}: it must be a multiple of 16")
    # Before the imports, which take seconds.
    typer.echo(f"solving {demonstrations:,} tasks with the environment's reference solution")

    from turnwise.envs.registration import env_class
    from turnwise.ext.first_model.first_model import TRAINING, FirstModel, demonstrate, write_first_model
    from turnwise.tasks.seeded import source

    spec = env_spec(env, config, None, None, None)
    plan = FirstModel(spec, tasks, demonstrations, steps, seed, width, layers, wrong)
    write_first_model(plan, asyncio.run(demonstrate(plan)), directory)
    file, colon, name = env.rpartition(":")
    reference = f"{os.path.relpath(file)}{colon}{name}" if file.endswith(".py") else env
    held_out = tasks or (None if env_class(spec.id).default_tasks else source(200, "test"))
    tasks_option = "" if held_out is None else f" --tasks '{held_out}'"
    typer.echo(f"turnwise eval {reference} --model {directory}{tasks_option} evaluates it")
    typer.echo(f"turnwise train {directory / TRAINING} trains it, with rates for its size")
    return CommandResult({"model": directory, "config": directory / TRAINING, "env": reference, "tasks": held_out})


def demos(
    env: EnvReference,
    file: Annotated[Path, typer.Argument(help="File to write, as JSON lines.", show_default=False)],
    config: ConstructorArguments = None,
    tasks: EnvTasks = None,
    number: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of solved tasks.")] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the episodes.")] = 0,
) -> CommandResult:
    """Write demonstrations for a pretrained model, rows of turnwise sft: conversations that solve() plays."""
    import asyncio

    import orjson

    from turnwise.append_file import replace_file
    from turnwise.errors import ConfigError
    from turnwise.ext.first_model.first_model import FirstModel, demonstrate

    if file.exists():
        raise ConfigError(f"{file} exists: name a file that does not")
    spec = env_spec(env, config, None, None, None)
    rows = asyncio.run(demonstrate(FirstModel(spec, tasks, number, seed=seed, wrong=0.0)))
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, b"".join(orjson.dumps(row) + b"\n" for row in rows))
    typer.echo(f"{file}: {len(rows)} demonstrations; data: {file} in a configuration of turnwise sft trains on them")
    return CommandResult({"file": file, "demonstrations": len(rows)})
