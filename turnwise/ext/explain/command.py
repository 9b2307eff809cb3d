"""The command ``turnwise explain``: why a run does not learn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.ext.explain.explain import Explanation
    from turnwise.ext.explain.findings import Finding

_STYLES: Final = {"problem": ("✗", "red"), "warning": ("!", "yellow"), "note": ("·", "cyan")}


def explain(
    run: Annotated[Path, typer.Argument(help="Directory of a training run.", show_default=False)],
    number: Annotated[int | None, typer.Option("--n", "-n", min=1, help="Most findings; by default all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Say what holds learning back: the first cause first, with evidence and the keys to change."""
    import json

    from rich.console import Console

    from turnwise.ext.explain.explain import explain_run

    explanation = explain_run(run)
    if as_json:
        typer.echo(json.dumps(explanation.to_json(), ensure_ascii=False))
        return
    show_explanation(explanation, Console(), number)


def show_explanation(explanation: Explanation, console: Console, number: int | None = None) -> None:
    """Print findings; ``number`` is how many at most."""
    from rich.text import Text

    console.print(
        Text(f"{explanation.run}: {explanation.steps} steps, {explanation.trajectories:,} trajectories"), soft_wrap=True
    )
    if not explanation.findings:
        console.print(Text("nothing holds it back by what it recorded"), soft_wrap=True)
    for finding in explanation.findings[:number]:
        _show_finding(finding, console)
    for note in explanation.unread:
        console.print(Text(f"not looked at: {note}", style="dim"), soft_wrap=True)


def _show_finding(finding: Finding, console: Console) -> None:
    from rich.text import Text

    from turnwise.ext.explain.findings import KINDS

    level = finding.level.name.lower()
    mark, style = _STYLES[level]
    share = f" ({finding.share:.0%} of the signal)" if finding.share else ""
    console.print()
    console.print(
        Text.assemble((f"{mark} {level} {finding.name}: ", f"bold {style}"), f"{finding.text}{share}"), soft_wrap=True
    )
    for line in finding.evidence:
        console.print(Text(f"    {line}"), soft_wrap=True)
    remedy = KINDS[finding.name].remedy
    remedy = f"{remedy} ({', '.join(finding.keys)})" if finding.keys else remedy
    console.print(Text.assemble(("    change: ", "bold"), remedy), soft_wrap=True)
