"""The command ``turnwise report``: the report of runs as one HTML file, written once or for as long as they go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from turnwise.append_file import is_locked
from turnwise.cli.options import CommandResult
from turnwise.errors import FormatError

if TYPE_CHECKING:
    from turnwise.ext.report.page import ReportFile

_LEAST_WAIT_S: Final = 5.0
_WAIT_SHARE: Final = 9.0
"""A report that goes on with its runs is written at most every five seconds, and in at most a tenth of the time."""


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories, or files of trajectories.", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write; an earlier one is replaced.")] = Path(
        "report.html"
    ),
    max_mb: Annotated[
        float, typer.Option("--max-mb", min=1.0, help="Largest size of the file, in millions of bytes.")
    ] = 25.0,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Write it again while the runs go on; an open page loads it again.")
    ] = False,
) -> CommandResult:
    """Write one HTML file with the curves, tasks, trajectories, tokens and failures of runs."""
    from turnwise.ext.report.page import MEGABYTE, write_report

    max_bytes = int(max_mb * MEGABYTE)
    reports = follow_runs(runs, out, max_bytes) if follow else iter([write_report(runs, out, max_bytes=max_bytes)])
    written = next(reports)
    if follow:
        typer.echo(f"writing {out.resolve()} until the runs have ended; Ctrl-C ends it before")
    if show:
        _open(out.resolve().as_uri())
    written = [written, *reports][-1]
    count = f"{written.readable:,} of {written.total:,} trajectories"
    typer.echo(f"written: {out.resolve()} ({written.size / MEGABYTE:.1f} MB, {count})")
    for note in written.notes:
        typer.echo(f"note: {note}", err=True)
    return CommandResult(asdict(written))


def follow_runs(
    runs: Sequence[Path], out: Path, max_bytes: int, wait: Callable[[float], object] = time.sleep
) -> Iterator[ReportFile]:
    """Write the report of runs again and again until no process works on them, or until Ctrl-C; yield each.

    Args:
        runs: As of :func:`~turnwise.ext.report.page.write_report`.
        out: The file.
        max_bytes: Its largest size.
        wait: Waits for some seconds.

    Raises:
        ConfigError: As of :func:`~turnwise.ext.report.page.write_report`.
        FormatError: Likewise, of the first report or the last one.
    """
    from turnwise.ext.report.page import write_report

    is_first = True
    try:
        # Asked before the files are read: what a run writes at its end is in the last report.
        while any(run.is_dir() and is_locked(run) for run in runs):
            begin = time.monotonic()
            try:
                yield write_report(runs, out, max_bytes=max_bytes, reload_s=_LEAST_WAIT_S)
            except FormatError:
                # A run that resumes cuts its files while they are read; the next report is whole again.
                if is_first:
                    raise
            is_first = False
            wait(max(_LEAST_WAIT_S, _WAIT_SHARE * (time.monotonic() - begin)))
    except KeyboardInterrupt:
        # The last report is written then, too: an open page stops to load it again.
        pass
    yield write_report(runs, out, max_bytes=max_bytes)


def _open(address: str) -> None:
    import webbrowser

    try:
        is_open = webbrowser.open(address)
    except webbrowser.Error:
        is_open = False
    if not is_open:
        typer.echo(f"no browser was found: open {address}", err=True)
