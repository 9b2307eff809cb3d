"""The command ``turnwise report``: the report of runs as one HTML file, or served and followed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories, or files of trajectories.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file to write, by default report.html; an earlier one is replaced."),
    ] = None,
    max_mb: Annotated[
        float | None,
        typer.Option("--max-mb", min=1.0, help="Largest size of the file, in millions of bytes; by default 25."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve it on this machine until interrupted, updated as the runs go on.")
    ] = False,
    port: Annotated[
        int | None, typer.Option("--port", "-p", min=0, max=65535, help="Port of --serve; by default a free one.")
    ] = None,
) -> None:
    """Write one HTML file with the curves, tasks, trajectories, tokens and failures of runs; or serve them live."""
    from turnwise.errors import ConfigError
    from turnwise.ext.report.page import DEFAULT_SIZE, MEGABYTE, write_report

    if serve:
        for option, value in (("--out", out), ("--max-mb", max_mb)):
            if value is not None:
                raise ConfigError(f"{option} is {value}, but --serve writes no file: leave one of them out")
        _serve_report(runs, port or 0, show)
        return
    if port is not None:
        raise ConfigError(f"--port is {port}, but nothing is served: add --serve, or leave it out")
    out = out or Path("report.html")
    report = write_report(runs, out, max_bytes=DEFAULT_SIZE if max_mb is None else int(max_mb * MEGABYTE))
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)
    count = f"{report.readable:,} of {report.total:,} trajectories"
    typer.echo(f"written: {out.resolve()} ({report.size / MEGABYTE:.1f} MB, {count})")
    if show:
        _open(out.resolve().as_uri())


def _open(address: str) -> None:
    import webbrowser

    try:
        is_open = webbrowser.open(address)
    except webbrowser.Error:
        is_open = False
    if not is_open:
        typer.echo(f"no browser was found: open {address}", err=True)


def _serve_report(runs: list[Path], port: int, show: bool) -> None:
    import asyncio

    from turnwise.ext.report.server import ReportServer, serve_report

    def ready(url: str) -> None:
        typer.echo(f"the report of {', '.join(map(str, runs))}: {url} (Ctrl-C ends it)")
        if show:
            _open(url)

    asyncio.run(serve_report(ReportServer(runs, port), ready))
