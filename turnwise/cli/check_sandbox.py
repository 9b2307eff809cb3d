"""``turnwise check-sandbox``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.sandboxes.checker import Outcome, SandboxReport


def command(
    name: Annotated[
        str, typer.Argument(help="A backend: local, docker, e2b, pkg.mod:Class or file.py:Class.")
    ] = "local",
    config: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of its constructor.", show_default=False),
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="Ask for sandboxes of this image or template.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Run only checks whose names begin so, such as attack. Repeatable."),
    ] = None,
    attacks: Annotated[bool, typer.Option("--attacks/--no-attacks", help="Also attack it, within bounds.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one check may take.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Examine sandboxes: the contract, and whether they hold back what they say; exit 1 after a failure."""
    import asyncio
    import json

    from rich.console import Console

    from turnwise.config import parse_overrides
    from turnwise.sandboxes import SandboxConfig, SandboxSpec
    from turnwise.sandboxes.checker import check_sandbox

    console = Console()
    report = asyncio.run(
        check_sandbox(
            SandboxConfig(name=name, config=parse_overrides(config or ())),
            spec=SandboxSpec(image=image),
            only=only or (),
            attacks=attacks,
            timeout=timeout,
            watch=None if as_json else lambda outcome: _tell(outcome, console),
        )
    )
    if as_json:
        typer.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        _show(report, console)
    if not report.ok:
        raise typer.Exit(1)


def _tell(outcome: Outcome, console: Console) -> None:
    """Print a failure as soon as it is known; all attacks stand in the table at the end."""
    from rich.text import Text

    if outcome.status == "failed" or (outcome.status == "skipped" and not outcome.attack):
        mark, style = ("✗", "bold red") if outcome.status == "failed" else ("-", "dim")
        console.print(Text.assemble((f"{mark} {outcome.name}: ", style), outcome.message), soft_wrap=True)


def _show(report: SandboxReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    styles = {"held": "green", "open": "yellow", "escaped": "bold red", "failed": "bold red", "skipped": "dim"}
    if report.attacks:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("attack", "held back by", "outcome", "what it got"):
            table.add_column(title, overflow="fold")
        for each in report.attacks:
            words = Text(each.status, style=styles[each.status])
            table.add_row(each.name.removeprefix("attack: "), each.containment, words, each.message)
        console.print(table)
    if report.capabilities is not None:
        for note in report.capabilities.notes:
            console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)
    console.print(Text(report.summary, style="green" if report.ok else "bold red"), soft_wrap=True)
