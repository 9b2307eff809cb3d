"""What a person sees who waits: a bar, the last steps and a curve, or a line per step.

Owns: :class:`LiveDisplay`. Refuses: computing metrics.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_SHOWN_STEPS = 8
_TICKS = "▁▂▃▄▅▆▇█"


class LiveDisplay:
    """Shows how far a run is: a bar, the last steps as a table, and a curve of one metric.

    On a terminal it redraws in place; elsewhere (a file, CI) it prints a line per step. A context manager.

    Args:
        title: What runs.
        total: How many steps; None where the run ends by something else.
        columns: Heading and metric of each column; a metric that a step lacks is left blank.
        curve: Metric whose course is drawn beside the bar.
        console: Where to; by default standard error, so that results on standard output stay alone.
        done: Steps that were done before this process (a resumed run); they do not count for the time left.
        begun: Which share of the whole those were, where it is not their share of ``total``.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        columns: Mapping[str, str],
        *,
        curve: str | None = None,
        console: Console | None = None,
        done: int = 0,
        begun: float | None = None,
    ) -> None:
        self._title = title
        self._columns = dict(columns)
        self._curve = curve
        self._console = console or Console(stderr=True)
        self._rows: deque[list[str]] = deque(maxlen=_SHOWN_STEPS)
        self._values: list[float] = []
        self._total = total
        self._begun = self._share(done) if begun is None else begun
        self._started = time.monotonic()
        self._status = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._task = self._progress.add_task(title, total=total, completed=done, left="")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()
            self._live = None

    def status(self, text: str) -> None:
        """Say what is being done now (``rollout``, ``update``, ``evaluation``)."""
        self._status = text
        if self._live is not None:
            self._live.update(self._render())

    def say(self, text: str) -> None:
        """Print a line that stays, above what is redrawn."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float], *, share: float | None = None) -> None:
        """Show that ``step`` steps are done, with the metrics of the last one.

        Args:
            step: Steps that are done.
            metrics: Of the last one.
            share: Which share of the whole that is; by default that of ``total``.
        """
        share = self._share(step) if share is None else share
        cells = [str(step), *(_number(metrics.get(name)) for name in self._columns.values())]
        self._rows.append(cells)
        if self._curve is not None and self._curve in metrics:
            self._values.append(metrics[self._curve])
        total = self._total if self._total is not None else round(step / share) if share else None
        self._progress.update(self._task, completed=step, total=total, left=self._time_left(share))
        if self._live is not None:
            self._live.update(self._render())
        else:
            named = "  ".join(f"{head} {cell}" for head, cell in zip(self._columns, cells[1:], strict=True) if cell)
            of = f"/{self._total}" if self._total is not None else f" ({min(share, 1):.0%})"
            self.say(f"{self._title} {step}{of}  {named}  {self._time_left(share)}".rstrip())

    def _share(self, step: int) -> float:
        return step / self._total if self._total else 0.0

    def _time_left(self, share: float) -> str:
        if share <= self._begun:
            return ""
        left = (time.monotonic() - self._started) / (share - self._begun) * max(0.0, 1 - share)
        return f"{int(left // 60)}:{int(left % 60):02d} left"

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(self._progress)
        if self._values:
            last = f"{self._values[-1]:.3f}"
            grid.add_row(f"{self._curve} {sparkline(self._values)} {last}")
        if self._rows:
            table = Table("step", *self._columns, box=None, padding=(0, 1), header_style="bold")
            for cells in self._rows:
                table.add_row(*cells)
            grid.add_row(table)
        if self._status:
            grid.add_row(f"[dim]{self._status}[/dim]")
        return grid


def sparkline(values: list[float], width: int = 40) -> str:
    """Return values as a curve of block characters, averaged down to ``width``."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    size = max(1, math.ceil(len(finite) / width))
    means = [sum(part) / len(part) for part in (finite[n : n + size] for n in range(0, len(finite), size))]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_TICKS[min(len(_TICKS) - 1, int((value - low) / span * len(_TICKS)))] for value in means)


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
