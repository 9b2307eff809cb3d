"""The commands that read what was recorded: ``view``, ``audit``, ``compare`` and ``export``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from turnwise.cli.options import AsJson, CommandResult


def view(
    source: Annotated[Path, typer.Argument(help="Run directory, or file of trajectories.", show_default=False)],
    task: Annotated[str | None, typer.Option("--task", help="Only this task.")] = None,
    trajectory: Annotated[str | None, typer.Option("--id", help="Only the trajectory with this id.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Only this partition: train or val.")] = None,
    number: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of trajectories, newest last.")] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also show ids, logprobs and weight versions.")] = False,
    as_json: AsJson = False,
) -> CommandResult:
    """Show trajectories: messages, tool calls, rewards, forks and stop reasons."""
    from rich.console import Console

    from turnwise.evaluation.view import Selection, show, trajectory_values

    selection = Selection(task=task, trajectory=trajectory, partition=partition, number=number)
    trajectories = show(source, selection, tokens=tokens, console=Console(quiet=as_json))
    return CommandResult([trajectory_values(entry, tokens=tokens) for entry in trajectories])


def audit(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    recompute: Annotated[
        bool, typer.Option(help="Recompute logprobs for weight versions with a checkpoint on disk.")
    ] = True,
    at_most: Annotated[
        int, typer.Option("--at-most", min=1, help="Recompute at most this many turns per weight version.")
    ] = 256,
    certificate: Annotated[
        Path | None, typer.Option(help="Write what was proven to this file of JSON, with its hash.", show_default=False)
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Verify a certificate again, with its own settings.", show_default=False)
    ] = None,
) -> CommandResult:
    """Verify from a run's files that tokens were recorded and trained exactly; exit 1 on a contradiction."""
    from rich.console import Console

    from turnwise.trainer.run.audit import audit_run

    if certificate is not None or check is not None:
        # Its module brings torch, which an audit without recomputing does not need.
        from turnwise.trainer.run.certificate import audit_certified, read_certificate

        differences = audit_certified(run, recompute=recompute, at_most=at_most, certificate=certificate, check=check)
        for line in differences:
            typer.echo(f"✗ {line}", err=True)
        result = {"sound": True, "differences": differences}
        if certificate is not None:
            result["certificate"] = read_certificate(certificate)
            typer.echo(f"wrote {certificate}")
        if check is not None and not differences:
            typer.echo(f"✓ {check} holds: the run proves all of it again")
        return CommandResult(result, failed=bool(differences))
    report = audit_run(run, recompute=recompute, at_most=at_most, console=Console())
    result = {"sound": report.sound, "contradictions": report.contradictions}
    result |= {"counts": report.counts, "figures": report.figures, "unchecked": report.unchecked}
    return CommandResult(result, failed=not report.sound)


def compare(
    before: Annotated[Path, typer.Argument(help="Directory of an evaluation.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="Directory of another one on the same tasks.", show_default=False)],
    metric: Annotated[
        Literal["success", "reward"] | None,
        typer.Option("--metric", help="What is compared; by default both, as JSON success.", show_default=False),
    ] = None,
    part: Annotated[
        Literal["sampled", "greedy"] | None,
        typer.Option("--part", help="Sampled or greedy episodes; by default sampled ones, if any."),
    ] = None,
    number: Annotated[int, typer.Option("--n", "-n", min=0, help="Most tasks listed of each kind of change.")] = 10,
) -> CommandResult:
    """Compare two evaluations task by task: difference, 95 % interval, paired test, tasks that changed sides."""
    from rich.console import Console

    from turnwise.evaluation.comparison import compare, comparison_table, read_scores
    from turnwise.evaluation.metrics import print_table

    comparisons = [
        compare(*(read_scores(folder, metric=name, part=part) for folder in (before, after)))
        for name in (("success", "reward") if metric is None else (metric,))
    ]
    first, last = comparisons[0], comparisons[-1]
    if replace(last, metric=first.metric, gained=first.gained, lost=first.lost) == first:
        # Where each reward is 0 or 1 they have the same figures.
        comparisons = [replace(first, metric=" and ".join(dict.fromkeys((first.metric, last.metric))))]
    for comparison in comparisons:
        print_table(Console(), comparison_table(comparison, (str(before), str(after)), limit=number))
    return CommandResult(first.to_json())


def export(
    source: Annotated[Path, typer.Argument(help="Run directory, checkpoint, or directory of a model or adapter.")],
    target: Annotated[
        Path, typer.Argument(help="Output file or directory; it must be missing (a model's may be empty).")
    ],
    to: Annotated[
        Literal["model", "jsonl", "sft", "preference"],
        typer.Option("--to", help="A model, or the run's conversations."),
    ] = "model",
    step: Annotated[
        int | None, typer.Option("--step", help="Export the run's checkpoint of this step; by default the newest.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Export the run's best checkpoint (checkpoint.best).")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write only the adapter, for peft.")] = False,
    partition: Annotated[
        Literal["train", "val"] | None, typer.Option("--partition", help="Only trajectories of this partition.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="The policy to export, or the only one whose conversations are.")
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Only conversations with at least this reward.")
    ] = None,
    best_per_task: Annotated[
        int | None, typer.Option("--best-per-task", min=1, help="Most conversations of a task, best first.")
    ] = None,
) -> CommandResult:
    """Export a model in Hugging Face format (adapters merged), a run's trajectories, or a run (to FILE.turnwise)."""
    from turnwise.errors import ConfigError
    from turnwise.plugins import load_object, references

    models = {"--step": step is not None, "--best": best, "--adapter": adapter}
    filters = (partition, policy, min_reward, best_per_task)
    names = ("--partition", "--policy", "--min-reward", "--best-per-task")
    runs = {name: value is not None for name, value in zip(names, filters, strict=True) if name != "--policy"}
    if unfitting := [name for name, is_set in (runs if to == "model" else models).items() if is_set]:
        reason = "a model has none" if to == "model" else "they choose a model: leave out --to"
        raise ConfigError(f"--to is {to}, with {', '.join(unfitting)}: {reason}")
    if to == "model" and (pack := references("run_files").get(target.suffix.removeprefix("."))):
        load_object(pack, "run file")(source, target)
        typer.echo(f"{target}: the run {source}; turnwise reproduce {target}")
        return CommandResult({"target": target, "run": source})
    if to == "model":
        from turnwise.trainer.run.export import export_model

        checkpoint = export_model(source, target, step=step, best=best, adapter=adapter, policy=policy)
        typer.echo(f"{target} (from {checkpoint})")
        return CommandResult({"target": target, "checkpoint": checkpoint})
    from turnwise.evaluation.export import Choice, export_run

    count = export_run(source, target, to, Choice(partition, policy, min_reward, best_per_task))
    typer.echo(f"{target}: {count} conversations of {source}")
    return CommandResult({"target": target, "run": source, "conversations": count})
