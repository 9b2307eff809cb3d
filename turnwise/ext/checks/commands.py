"""The commands ``check-env``, ``check-sandbox``, ``replay``, ``bisect`` and ``reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.options import (
    AsJson,
    CommandResult,
    ConstructorArguments,
    EnvReference,
    EnvTasks,
    FunctionTools,
    MCPServers,
    ToolConfig,
    env_spec,
)

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.envs.registration import EnvSpec
    from turnwise.ext.checks.environment import CheckReport
    from turnwise.ext.checks.environment.context import PromptIds, TokenCounter
    from turnwise.ext.checks.sandbox.report import Outcome, SandboxReport
    from turnwise.tasks.core import Task


ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model", "-m", help="Model directory: count tokens with its tokenizer, check that its prompts show the tools."
    ),
]
TemplateName = Annotated[
    str | None, typer.Option("--chat-template", help="Chat template instead of the model's, as renderer.chat_template.")
]


def check_env(
    env: EnvReference,
    config: ConstructorArguments = None,
    tasks: EnvTasks = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Maximum number of tasks; by default 3 are played and all are validated."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds to play.")] = 2,
    timeout: Annotated[float, typer.Option("--timeout", help="Timeout of one call, in seconds.")] = 30.0,
    context_length: Annotated[
        int | None, typer.Option("--context-length", min=1, help="Context length to check lengths against, in tokens.")
    ] = None,
    model: ModelFolder = None,
    chat_template: TemplateName = None,
    functions: FunctionTools = None,
    tool_config: ToolConfig = None,
    mcp: MCPServers = None,
    as_json: AsJson = False,
) -> CommandResult:
    """Check an environment: contract, determinism, leaks, lengths, policies, cost; exit 1 on errors."""
    import asyncio

    from rich.console import Console

    from turnwise.ext.checks.environment import check_env

    spec = env_spec(env, config, functions, tool_config, mcp)
    tasks, rows = load_rows(spec, tasks, limit)
    count, prompt = _load_tokenizer(model, chat_template)
    report = asyncio.run(
        check_env(
            spec,
            tasks=rows,
            looked_at=tasks if limit is None else rows,
            seeds=tuple(range(seeds)),
            timeout=timeout,
            context_length=context_length,
            count_tokens=count,
            prompt=prompt,
        )
    )
    show_report(report, Console(quiet=as_json))
    return CommandResult(report.to_json(), failed=not report.ok)


def load_rows(spec: EnvSpec, tasks: str | None, limit: int | None) -> tuple[str | None, list[Task] | None]:
    """Return the task source that is looked at, and the tasks that are played. Raises TaskError without any."""
    from turnwise.envs.registration import default_task_source
    from turnwise.errors import TaskError
    from turnwise.ext.checks.environment.core import DEFAULT_TASKS
    from turnwise.tasks.reader import load_tasks

    if tasks is None and limit is not None:
        tasks = default_task_source(spec.id, spec.config)
    rows = None if tasks is None else load_tasks(tasks, limit=limit or DEFAULT_TASKS)
    if rows == []:
        raise TaskError(f"--tasks {tasks}: it contains no tasks")
    return tasks, rows


def _load_tokenizer(model: Path | None, chat_template: str | None) -> tuple[TokenCounter | None, PromptIds | None]:
    """Return a token counter and, with a chat template, a prompt renderer of the model."""
    from turnwise.chat.model_dir import read_model_dir
    from turnwise.errors import ConfigError
    from turnwise.inference.config import RendererConfig
    from turnwise.model.canonical import canonical_messages

    if model is None:
        if chat_template is not None:
            raise ConfigError(f"--chat-template is {chat_template}, but it needs a model: add --model DIR")
        return None, None
    files = read_model_dir(model)

    def count(text: str) -> int:
        return len(files.tokenizer.encode(text, add_special_tokens=False).ids)

    if chat_template is None and files.template is None:
        return count, None
    renderer = RendererConfig(chat_template=chat_template).load(model)
    return count, lambda messages, tools: renderer.render(canonical_messages(messages), tools).tolist()


def show_report(report: CheckReport, console: Console) -> None:
    """Print what the environment checker found."""
    from rich.table import Table
    from rich.text import Text

    for finding in (*report.errors, *report.warnings):
        is_error = finding.severity == "error"
        mark, style = ("✗", "red") if is_error else ("!", "yellow")
        console.print(Text.assemble((f"{mark} {finding.check}: ", f"bold {style}"), finding.message), soft_wrap=True)
        for label, text in (("where", finding.where), ("remedy", finding.remedy)):
            if text:
                console.print(Text(f"    {label}: {text}", style="dim" if label == "where" else ""), soft_wrap=True)
    if report.figures:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in report.figures.items():
            table.add_row(name, f"{value:.4g}")
        console.print(table)
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)
    for reason in dict.fromkeys(report.skipped.values()):
        names = ", ".join(name for name, why in report.skipped.items() if why == reason)
        console.print(Text(f"not run: {names} ({reason})", style="dim"), soft_wrap=True)
    style = "bold red" if not report.ok else "yellow" if report.warnings else "green"
    console.print(Text(report.summary, style=style), soft_wrap=True)


def check_sandbox(
    name: Annotated[
        str, typer.Argument(help="Sandbox backend: local, docker, e2b, pkg.mod:Class or file.py:Class.")
    ] = "local",
    config: ConstructorArguments = None,
    image: Annotated[str | None, typer.Option("--image", help="Image or template of the sandboxes.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run only checks with this prefix, such as attack. Repeatable.")
    ] = None,
    attacks: Annotated[bool, typer.Option("--attacks/--no-attacks", help="Also attack the isolation.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Timeout of one check, in seconds.")] = 120.0,
    as_json: AsJson = False,
) -> CommandResult:
    """Check a sandbox backend: its contract, and whether the isolation that it declares holds; exit 1 on failures."""
    import asyncio

    from rich.console import Console

    from turnwise.config import parse_overrides
    from turnwise.ext.checks.sandbox.core import check_sandbox
    from turnwise.sandboxes.config import SandboxConfig
    from turnwise.sandboxes.core import SandboxSpec

    console = Console(quiet=as_json)
    report = asyncio.run(
        check_sandbox(
            SandboxConfig(name=name, config=parse_overrides(config or ())),
            spec=SandboxSpec(image=image),
            only=only or (),
            attacks=attacks,
            timeout=timeout,
            watch=lambda outcome: _show_outcome(outcome, console),
        )
    )
    _show_sandbox(report, console)
    return CommandResult(report.to_json(), failed=not report.ok)


def _show_outcome(outcome: Outcome, console: Console) -> None:
    from rich.text import Text

    if outcome.status == "failed" or (outcome.status == "skipped" and not outcome.attack):
        mark, style = ("✗", "bold red") if outcome.status == "failed" else ("-", "dim")
        console.print(Text.assemble((f"{mark} {outcome.name}: ", style), outcome.message), soft_wrap=True)


def _show_sandbox(report: SandboxReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from turnwise.evaluation.metrics import print_table

    styles = {"held": "green", "open": "yellow", "escaped": "bold red", "failed": "bold red", "skipped": "dim"}
    if report.attacks:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("attack", "contained by", "outcome", "details"):
            table.add_column(title, overflow="fold")
        for attack in report.attacks:
            status = Text(attack.status, style=styles[attack.status])
            table.add_row(attack.name.removeprefix("attack: "), attack.containment, status, attack.message)
        print_table(console, table)
    if report.capabilities is not None:
        for note in report.capabilities.notes:
            console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)
    console.print(Text(report.summary, style="green" if report.ok else "bold red"), soft_wrap=True)


def replay(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of an evaluation or a run.", show_default=False)
    ],
    number: Annotated[int | None, typer.Option("--n", "-n", min=1, help="Only the newest N episodes.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="Only episodes of this task.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Compare what the environment says varies (times, paths), too.")
    ] = False,
) -> CommandResult:
    """Play recorded completions against their environments again; exit 1 where a tool, reward or state differs."""
    from turnwise.ext.checks.replay import replay_run

    report = replay_run(source, number=number, task=task, strict=strict)
    for divergence in report.divergences:
        typer.secho(str(divergence), fg="red")
    for reason, count in report.left_out.most_common():
        typer.echo(f"left out: {count} episodes, {reason}")
    for name, count in report.varied.most_common():
        typer.echo(f"varied, as the environment says: {name} in {count} messages")
    typer.echo(f"{report.episodes} episodes replayed, {len(report.divergences)} diverge")
    differing = [divergence.to_json() for divergence in report.divergences]
    result = {"episodes": report.episodes, "left_out": report.left_out, "varied": report.varied}
    result["divergences"] = differing
    return CommandResult(result, failed=bool(report.divergences) or not report.episodes)


def bisect(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of an evaluation or a run.", show_default=False)
    ],
    episode: Annotated[
        str,
        typer.Argument(metavar="EPISODE", help="Id of an episode or trajectory (turnwise view).", show_default=False),
    ],
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Model that continues it; by default the evaluation's.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="URL of a running server of it.")] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Continuations from each turn.")] = 4,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Sampling temperature.")] = None,
    success_reward: Annotated[
        float | None, typer.Option("--success-reward", help="Minimum reward of a success; by default the evaluation's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the continuations.")] = 0,
) -> CommandResult:
    """Continue an episode from each of its turns, and print at which turn it was won or lost."""
    from rich.console import Console

    from turnwise.ext.checks.bisect import BisectSettings, run_bisect

    urls = tuple(address.strip() for address in (url or "").split(",") if address.strip())
    bisection = run_bisect(BisectSettings(source, episode, model, urls, samples, temperature, success_reward, seed))
    Console().print(bisection.table())
    typer.echo(bisection.verdict())
    return CommandResult(bisection.to_json())


def reproduce(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|FILE", help="Directory of a run, or its file.", show_default=False)
    ],
    runs: Annotated[
        Path, typer.Option("--runs", help="Folder of the new run's directory, which has the run's name.")
    ] = Path("runs/reproduced"),
    allow_differences: Annotated[
        bool, typer.Option("--allow-differences", help="Execute it anyway; compare rewards where bits differ.")
    ] = False,
) -> CommandResult:
    """Execute a run again in a new directory, and print that it is equal, bit for bit, or the first difference."""
    from turnwise.ext.checks.reproduce import reproduce

    result = reproduce(source, runs, allow_differences=allow_differences)
    for line in result.environment:
        typer.echo(f"differs: {line}")
    typer.echo(result.verdict())
    if result.first is not None:
        typer.echo(result.comparison())
    failed = result.first is not None and not (allow_differences and result.alike)
    return CommandResult(result.to_json(), failed)
