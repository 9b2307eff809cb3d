"""``turnwise check-env``."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    env: Annotated[str, typer.Argument(help="A registered name, pkg.mod:Class or file.py:Class.", show_default=False)],
    config: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of its constructor.", show_default=False),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", "-t", help="Reset it with the first task of this source.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds to play.")] = 2,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one call may take.")] = 30.0,
) -> None:
    """Play short episodes and report where an environment breaks the contract; exit 1 if it does."""
    import asyncio

    from rich.console import Console
    from rich.text import Text

    from turnwise.config import parse_overrides
    from turnwise.envs import EnvSpec, check_env
    from turnwise.errors import TaskError
    from turnwise.tasks import load_tasks

    first = None if tasks is None else load_tasks(tasks, limit=1)
    if first == []:
        raise TaskError(f"--tasks {tasks}: there is no task in it")
    spec = EnvSpec(env, parse_overrides(config or ()))
    report = asyncio.run(check_env(spec, task=first[0] if first else None, seeds=tuple(range(seeds)), timeout=timeout))
    console = Console()
    for finding in report.findings:
        console.print(Text(f"✗ {finding}", style="red"), soft_wrap=True)
    words = f"{report.env}: {len(report.checks)} checks ({', '.join(report.checks)}), {len(report.findings)} findings"
    console.print(Text(words, style="green" if report.ok else "bold red"), soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)
