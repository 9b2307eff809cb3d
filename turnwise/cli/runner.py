"""``turnwise runner``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    agent: Annotated[str, typer.Option("--agent", help="A registered agent, pkg.mod:Name or file.py:Name.")],
    connect: Annotated[str, typer.Option("--connect", help="URL of the run, as it prints it.")],
    key_file: Annotated[Path, typer.Option("--key-file", help="The key: a copy of rollout.remote.key_file.")],
    config: Annotated[
        list[str] | None, typer.Option("--config", "-c", help="key=value of the agent's configuration. Repeatable.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-n", min=1, help="Episodes at the same time.")] = 8,
    wait: Annotated[
        float | None, typer.Option("--wait", min=0, help="Seconds without a run after which to give up.")
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for another run when one has ended.")] = False,
) -> None:
    """Play episodes of a training or evaluation run elsewhere with an agent here."""
    import asyncio
    import sys

    from turnwise.agents.registry import make_agent
    from turnwise.config import parse_overrides
    from turnwise.errors import ConfigError
    from turnwise.inference.gateway.addresses import check_base
    from turnwise.rollout.remote.runner import RunnerOptions, read_key, serve_run

    try:
        check_base(connect)
    except ConfigError as error:
        raise ConfigError(f"--connect: {error}") from error
    made = make_agent(agent, **parse_overrides(config or ()))
    options = RunnerOptions(connect.rstrip("/"), read_key(key_file), concurrency, wait, stay)
    asyncio.run(serve_run(options, made, lambda text: print(text, file=sys.stderr, flush=True)))  # noqa: T201
