"""The command ``turnwise live``: serve a policy to users, and train it from their sessions, until it is stopped."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from turnwise.cli.options import Overrides

DEFAULTS: Final[dict[str, Any]] = {
    # Sessions are the tasks: one row stands where a run has its own.
    "tasks": "turnwise.tasks.seeded:tasks?n=1",
    "rollout": {"env": {"name": "task"}, "group_size": 1},
    "replay": {"strategy": "fifo"},
    "algorithm": {"advantage": "turnwise.ext.live.learning:reinforce"},
    "steps": 1_000_000,
}
"""What a configuration of ``turnwise train`` has to say besides, below every file."""


def live(
    config: Annotated[str, typer.Argument(help="YAML configuration file.", show_default=False)],
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove an existing run of this name first.")] = False,
    resume_step: Annotated[
        int | None,
        typer.Option("--resume-step", min=1, help="Resume from the checkpoint of this step and remove later ones."),
    ] = None,
) -> None:
    """Serve a policy over the wire APIs, and train it from consented sessions with feedback; resumes where it ended.

    CONFIG is one of turnwise train, whose section custom.live says how users are served.
    """
    from turnwise.config import load_config
    from turnwise.ext.live.learning import check_live, serve_and_learn
    from turnwise.plugins import without_collections
    from turnwise.trainer.config.train import TrainConfig

    checked = load_config(TrainConfig, config, overrides or (), DEFAULTS)
    check_live(checked)
    with without_collections():
        from turnwise.inference.builtin import forked_servers
        from turnwise.trainer.train import run_train
    with forked_servers([checked.of_policy(name).inference for name in checked.served]):
        run_train(checked, fresh=fresh, resume_step=resume_step, loop=serve_and_learn)
