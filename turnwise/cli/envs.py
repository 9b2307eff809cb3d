"""The commands ``turnwise envs``, ``envs show`` and ``init``: environments there are, and the package of a new one."""

from __future__ import annotations

import json
import keyword
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

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
    with_json,
)
from turnwise.plugins import load_object, references

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.envs.catalogue import EnvInfo, FirstObservation

CHECKED_TASKS = 3
"""Tasks that ``envs show`` has the checker play."""

TEMPLATES: Final = Path(__file__).with_name("project_files")

app = typer.Typer(help="List environments; `turnwise envs show NAME` prints one with its first observation.")


@app.callback(invoke_without_command=True)
def envs(context: typer.Context, as_json: AsJson = False) -> None:
    """List the registered environments: those of the package, of installed plugins and of your extensions."""
    if context.invoked_subcommand is not None:
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from turnwise.envs.catalogue import catalogue
    from turnwise.envs.registration import env_prefixes
    from turnwise.evaluation.metrics import print_table

    infos = catalogue()
    if as_json:
        typer.echo(json.dumps([info.to_json() for info in infos], ensure_ascii=False))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("environment", "what it is", "tools", "tasks"):
        table.add_column(title, overflow="fold")
    for info in infos:
        summary = Text(info.problem, style="red") if info.problem else Text(info.summary)
        tasks = "-" if info.tasks is None else info.tasks.removeprefix("turnwise.ext.environments.")
        table.add_row(Text(info.name, style="bold"), summary, Text(_shortened(info.tools)), Text(tasks))
    console = Console()
    print_table(console, table)
    prefixes = ", ".join(f"{prefix}:NAME" for prefix in env_prefixes())
    console.print(f"of other frameworks: {prefixes}", style="dim", highlight=False, soft_wrap=True)
    console.print("any other: pkg.module:Class or path/to/file.py:Class", style="dim", highlight=False)


@app.command("show")
@with_json
def show(
    env: EnvReference,
    config: ConstructorArguments = None,
    tasks: EnvTasks = None,
    functions: FunctionTools = None,
    tool_config: ToolConfig = None,
    mcp: MCPServers = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Also run the environment checker, on a few tasks (turnwise check-env: all)."
        ),
    ] = True,
    as_json: AsJson = False,
) -> CommandResult:
    """Print an environment: configuration, tools, tasks, its first observation, and what the checker finds."""
    import asyncio

    from rich.console import Console

    from turnwise.envs.catalogue import describe, first_observation
    from turnwise.envs.registration import default_task_source
    from turnwise.errors import RegistryError

    info = describe(env)
    if info.problem:
        raise RegistryError(info.problem)
    console = Console(quiet=as_json)
    spec = env_spec(env, config, functions, tool_config, mcp)
    _print_info(info, tasks or default_task_source(env, spec.config), console)
    first = asyncio.run(first_observation(spec, tasks))
    _print_observation(first, console)
    result = info.to_json() | first.to_json()
    command = references("commands").get("check-env")
    if not check or command is None:
        return CommandResult(result)
    console.print()
    # A few tasks: check-env looks at all, which takes minutes where each is tried in a sandbox.
    checked: CommandResult = load_object(command, "command")(
        env, config, tasks, CHECKED_TASKS, functions=functions, tool_config=tool_config, mcp=mcp
    )
    return CommandResult(result | {"check": checked.values}, checked.failed)


def _print_info(info: EnvInfo, source: str | None, console: Console) -> None:
    from rich.text import Text

    from turnwise.envs.catalogue import MOST_TASKS, count_tasks

    # The module of a file has a name that nobody wrote.
    reference = "" if info.name.partition(":")[0].endswith(".py") else info.reference
    console.print(Text.assemble((info.name, "bold"), "  ", (reference, "dim")), soft_wrap=True)
    console.print(Text(info.summary))
    console.print(Text(f"configuration: {info.config or 'none'}", style="dim"), soft_wrap=True)
    if source is None:
        console.print(Text("tasks: none of its own: give --tasks, or episodes are drawn by their seeds", style="dim"))
        return
    number = count_tasks(source)
    count = f"{MOST_TASKS} or more" if number == MOST_TASKS else str(number)
    console.print(Text(f"tasks: {source} ({count})", style="dim"), soft_wrap=True)


def _print_observation(first: FirstObservation, console: Console) -> None:
    from rich.markup import escape
    from rich.text import Text

    if first.task is not None:
        console.print(Text(f"\ntask {first.task.id}", style="bold"))
    for message in first.messages:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
        console.print(f"[bold cyan]{escape(str(message.get('role')))}[/]", Text(text), sep="\n", soft_wrap=True)
    for schema in first.tools:
        names = ", ".join(schema.parameters.get("properties", {}))
        summary = schema.description.split("\n")[0]
        console.print(Text.assemble((f"{schema.name}({names})", "bold yellow"), f"  {summary}"), soft_wrap=True)


def _shortened(names: tuple[str, ...], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "-"


def init(
    name: Annotated[str, typer.Argument(help="Name of the environment, such as price-check.", show_default=False)],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The project's directory; by default ./NAME.", show_default=False)
    ] = None,
) -> CommandResult:
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
    files: list[Path] = []
    for template in templates.list_templates():
        file = folder / template.removesuffix(".jinja").replace("PACKAGE", package).replace("dot-", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(templates.get_template(template).render(words), encoding="utf-8")
        files.append(file)
    typer.echo(f"{folder}: {len(files)} files; begin with its README.md and src/{package}/env.py")
    return CommandResult({"folder": folder, "files": files})
