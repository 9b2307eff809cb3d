"""The commands that train: ``turnwise train``, ``plan`` and ``sft``."""

from __future__ import annotations

from dataclasses import asdict
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from turnwise.cli.options import CommandResult, Overrides, as_overrides
from turnwise.plugins import without_collections

if TYPE_CHECKING:
    from turnwise.trainer.config.train import TrainConfig
    from turnwise.trainer.scale.cluster import ClusterConfig


ConfigFile = Annotated[Path, typer.Argument(help="YAML configuration file.", show_default=False)]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="File with the section cluster.", show_default=False)
]

STEPS: Final = 100
"""Train steps of a run without a configuration file, unless ``steps`` is given."""


def train(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="YAML configuration file.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    env: Annotated[
        str | None, typer.Option("--env", help="Registered environment, pkg.mod:Class or file.py:Class.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="Directory of a Hugging Face model.")] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", "-t", help="Task file, or pkg.mod:function?key=value.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run; its directory is runs/NAME.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove an existing run of this name first.")] = False,
    resume_step: Annotated[
        int | None,
        typer.Option("--resume-step", min=1, help="Resume from the checkpoint of this step and remove later ones."),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Check everything the run needs, print its plan and exit; writes nothing.")
    ] = False,
    cluster: ClusterFile = None,
) -> CommandResult:
    """Train a policy with reinforcement learning; resumes from the last checkpoint if there is one."""
    from turnwise.config import load_config
    from turnwise.envs.registration import run_name
    from turnwise.errors import ConfigError
    from turnwise.trainer.config.train import TrainConfig

    arguments = list(overrides or ())
    if config is not None and "=" in config:
        # The file is optional, so the first argument can already be an override.
        arguments, config = [config, *arguments], None
    files = [] if config is None else [config, *filter(_is_file, arguments)]
    keys = [argument for argument in arguments if argument not in files]
    options: dict[str, Any] = {"rollout.env.name": env, "policies.main.model.path": model, "tasks": tasks, "name": name}
    if config is None and not any(key.startswith(("policies", "rollout")) for key in keys):
        _check_options(env, model)
    cluster_keys, keys = _split_plan(keys)
    if (cluster is not None or cluster_keys) and not dry:
        raise ConfigError(
            "a cluster is given, but only --dry-run and turnwise plan read it: add --dry-run, or remove it"
        )
    defaults = None if config is not None or env is None else {"name": run_name(env), "steps": STEPS}
    checked = load_config(TrainConfig, files, [*as_overrides(options), *keys], defaults)
    if fresh and resume_step is not None:
        raise ConfigError("--fresh removes the checkpoint that --resume-step resumes from: give only one of them")
    if dry:
        has_cluster = cluster is not None or bool(cluster_keys)
        return _dry_run(checked, fresh, _cluster_config(cluster, cluster_keys) if has_cluster else None)
    return _run(checked, fresh, resume_step)


def _run(checked: TrainConfig, fresh: bool, resume_step: int | None) -> CommandResult:
    with without_collections():
        from turnwise.inference.builtin import forked_servers
        from turnwise.trainer.train import run_train

    server_configs = []
    if checked.placement == "local":
        frozen = [policy for policy in checked.rollout.frozen.values() if policy.hosted is None and not policy.urls]
        server_configs = [checked.of_policy(name).inference for name in checked.served]
        server_configs += [policy.inference for policy in frozen]
    with forked_servers(server_configs):
        return CommandResult(asdict(run_train(checked, fresh=fresh, resume_step=resume_step)))


def _is_file(argument: str) -> bool:
    """Whether an argument is a further file, whose keys win over those of earlier ones."""
    return "=" not in argument and argument.endswith((".yaml", ".yml"))


def _check_options(env: str | None, model: Path | None) -> None:
    from turnwise.errors import ConfigError

    if env is None:
        raise ConfigError("nothing to train: give a configuration file, or --env NAME and --model DIR")
    if model is None:
        raise ConfigError(
            "--model is missing: give the directory of a Hugging Face causal model; models are not downloaded, and "
            f"turnwise make-model DIR --env {env} makes a small one from the environment's solve()"
        )


def _split_plan(keys: list[str]) -> tuple[list[str], list[str]]:
    """Split overrides into those of the section cluster, and those of a run."""
    of_cluster = [key for key in keys if key.startswith("cluster.")]
    return of_cluster, [key for key in keys if key not in of_cluster]


def _cluster_config(cluster: Path | None, keys: list[str]) -> ClusterConfig:
    from turnwise.config import load_config
    from turnwise.trainer.scale.cluster import PlanConfig

    return load_config(PlanConfig, [] if cluster is None else [str(cluster)], keys).cluster


def plan(
    config: Annotated[Path, typer.Argument(help="YAML configuration file of a run.", show_default=False)],
    overrides: Overrides = None,
    cluster: ClusterFile = None,
) -> CommandResult:
    """Estimate the memory of each device of a run on a cluster, such as cluster.device=h100 cluster.count=8."""
    from turnwise.config import load_config
    from turnwise.errors import ConfigError
    from turnwise.trainer.config.train import TrainConfig
    from turnwise.trainer.scale.plan import Plan

    cluster_keys, arguments = _split_plan(list(overrides or ()))
    if cluster is None and not cluster_keys:
        raise ConfigError(
            "no cluster is given: add cluster.device=h100 cluster.count=8, or --cluster FILE with the section cluster"
        )
    files = [str(config), *filter(_is_file, arguments)]
    checked = load_config(TrainConfig, files, list(filterfalse(_is_file, arguments)))
    run_plan = Plan(checked, _cluster_config(cluster, cluster_keys))
    result = {"plan": list(run_plan.lines()), "problems": run_plan.problems()}
    for line in (*result["plan"], *(f"problem: {problem}" for problem in result["problems"])):
        typer.echo(line)
    return CommandResult(result, failed=bool(result["problems"]))


def _dry_run(config: TrainConfig, fresh: bool, cluster: ClusterConfig | None) -> CommandResult:
    import asyncio

    from rich.console import Console
    from rich.text import Text

    from turnwise.trainer.run.dry_run import dry_run

    report = asyncio.run(dry_run(config, fresh=fresh, cluster=cluster))
    console = Console(soft_wrap=True, highlight=False)
    for check in report.checks:
        mark, style = {"ok": ("✓", ""), "failed": ("✗", "red"), "not run": ("-", "dim")}[check.outcome]
        console.print(Text(f"{mark} {check.name}: {check.finding}", style=style))
    console.print()
    for line in report.plan:
        console.print(Text(line))
    failed = sum(check.outcome == "failed" for check in report.checks)
    verdict = "ready to start" if report.ok else f"{failed} of {len(report.checks)} checks failed, the run cannot start"
    console.print(Text(f"\n{config.name}: {verdict}", style="bold green" if report.ok else "bold red"))
    return CommandResult({"name": config.name, "ok": report.ok, **asdict(report)}, failed=not report.ok)


def sft(config: ConfigFile, overrides: Overrides = None) -> CommandResult:
    """Fine-tune a model on demonstrations, or on recorded trajectories (rejection sampling)."""
    from turnwise.config import load_config
    from turnwise.trainer.config.offline import SFTConfig
    from turnwise.trainer.offline.sft import run_sft

    return CommandResult(asdict(run_sft(load_config(SFTConfig, config, overrides or ()))))
