"""The commands that begin a project: ``turnwise init`` and ``turnwise make-model``."""

from __future__ import annotations

import keyword
import os
import re
from pathlib import Path
from typing import Annotated, Final

import typer

from turnwise.cli.options import ConstructorArguments, EnvTasks, env_spec

TEMPLATES: Final = Path(__file__).with_name("project")
_FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "train.yaml": "train.yaml",
    "smoke.yaml": "smoke.yaml",
    "ci.yml": ".github/workflows/ci.yml",
    "package.py": "src/{package}/__init__.py",
    "env.py": "src/{package}/env.py",
    "test_env.py": "tests/test_env.py",
}
"""File of the project by the name of its template."""


def init(
    name: Annotated[str, typer.Argument(help="Name of the environment, such as price-check.", show_default=False)],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The project's directory; by default ./NAME.", show_default=False)
    ] = None,
) -> None:
    """Begin a package for a new environment: environment, tasks, reward, tests, configuration, README and CI file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from turnwise.envs.registration import env_names
    from turnwise.errors import ConfigError

    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(f"NAME is {name!r}: write lower-case words joined by - or _, such as price-check")
    package = name.replace("-", "_")
    if name in env_names() or package in env_names() or package == "turnwise":
        raise ConfigError(f"NAME is {name!r}, which is taken by an environment: choose another name")
    folder = directory or Path.cwd() / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty directory: choose another one with --dir")
    words = {"name": name, "package": package, "class": "".join(map(str.capitalize, package.split("_"))) + "Env"}
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    for template, path in _FILES.items():
        file = folder / path.format(package=package)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(templates.get_template(f"{template}.jinja").render(words), encoding="utf-8")
    typer.echo(f"{folder}: {len(_FILES)} files; begin with its README.md and src/{package}/env.py")


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
) -> None:
    """Make a small model with its tokenizer for an environment, from the environment's reference solutions."""
    import asyncio

    from turnwise.errors import ConfigError

    if width % 16:
        raise ConfigError(f"--width is {width}: it must be a multiple of 16")
    # Before the imports, which take seconds.
    typer.echo(f"solving {demonstrations:,} tasks with the environment's reference solution")

    from turnwise.envs.registration import env_class
    from turnwise.tasks.seeded import source
    from turnwise.trainer.offline.first_model import TRAINING, FirstModel, demonstrate, write_first_model

    spec = env_spec(env, config, None, None, None)
    plan = FirstModel(spec, tasks, demonstrations, steps, seed, width, layers, wrong)
    write_first_model(plan, asyncio.run(demonstrate(plan)), directory)
    file, colon, name = env.rpartition(":")
    reference = f"{os.path.relpath(file)}{colon}{name}" if file.endswith(".py") else env
    held_out = tasks or (None if env_class(spec.id).default_tasks else source(200, "test"))
    tasks_option = "" if held_out is None else f" --tasks '{held_out}'"
    typer.echo(f"turnwise eval {reference} --model {directory}{tasks_option} evaluates it")
    typer.echo(f"turnwise train {directory / TRAINING} trains it, with rates for its size")
