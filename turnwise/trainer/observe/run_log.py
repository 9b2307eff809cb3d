"""The log of a run: its JSON lines file, logger threads, and the live display.

Each process of a run begins with ``{"kind": "start", "part": p, "step": n}``: it resumes after step ``n``. Records of
later steps by an earlier process were not checkpointed; they stay in the file, and readers skip them.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from turnwise.append_file import AppendFile
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.trainer.config.policy import LoggerConfig
from turnwise.trainer.observe.loggers import LOGGERS, LoggedRun, Logger, chosen_logger
from turnwise.trainer.observe.metrics import METRICS_FILE, figures


class JSONLLogger:
    """Appends one JSON object per line; each line is flushed when :meth:`log` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendFile(path)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record. Non-finite values become null. Raises DiskError where the disk refuses."""
        self._file.append(orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


CLOSE_S = 30.0
"""Seconds that a logger may take at the end to send what it was given."""


def check_loggers(configs: Sequence[LoggerConfig]) -> str:
    """Check that the packages of all loggers are installed, and return their names.

    Raises:
        MissingExtraError: One is not installed.
    """
    for config in configs:
        LOGGERS.find(config.name).check()
    return ", ".join(config.name for config in configs)


class RunLog(JSONLLogger):
    """Appends records to ``metrics.jsonl``, and passes their figures to loggers in one thread each.

    ``say`` reports a failed logger to the user.
    """

    def __init__(
        self, path: Path, loggers: Mapping[str, Logger] | None = None, say: Callable[[str], object] = print
    ) -> None:
        super().__init__(path)
        self._outlets = [_LoggerThread(name, logger, say) for name, logger in (loggers or {}).items()]

    @classmethod
    def open(cls, run: LoggedRun, loggers: Sequence[LoggerConfig], console: Console, *, part: int = 0) -> RunLog:
        """Open the log of a run and create its loggers; ``part`` numbers the processes of the run.

        Raises:
            ConfigError: A logger cannot be created.
            DiskError: The disk refuses.
        """
        say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        outlets: dict[str, Logger] = {}
        for number, config in enumerate(loggers):
            name = config.name if config.name not in outlets else f"{config.name} ({number})"
            try:
                outlets[name] = chosen_logger(config)(run)
            except TurnwiseError:
                raise
            except Exception as error:  # whatever a logger's package raises is named
                raise ConfigError(
                    f"loggers.{number} ({config.name}) cannot be opened: {type(error).__name__}: {error}; correct its "
                    "config, or remove it: metrics.jsonl has everything without it"
                ) from error
        log = cls(run.directory / METRICS_FILE, outlets, say)
        log.log({"kind": "start", "part": part, "step": run.step})
        return log

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record, and pass on the figures of a step or an evaluation."""
        super().log(record)
        if self._outlets and (values := figures(record)):
            for outlet in self._outlets:
                outlet.put(int(record["step"]), values)

    def counts(self) -> dict[str, float]:
        """Return the number of failed logger calls as a metric, if any."""
        failures = sum(outlet.failures for outlet in self._outlets)
        return {"loggers/failures": float(failures)} if failures else {}

    def close(self) -> None:
        """Close the file and the loggers, with :data:`CLOSE_S` each. Idempotent."""
        super().close()
        outlets, self._outlets = self._outlets, []
        for outlet in outlets:
            outlet.end()
        for outlet in outlets:
            outlet.wait()


class _LoggerThread:
    """One logger in its own thread."""

    def __init__(self, name: str, logger: Logger, say: Callable[[str], object]) -> None:
        self._name = name
        self._logger = logger
        self._say = say
        self._queue: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self.failures = 0
        # A daemon: a logger that hangs keeps no process from ending.
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        self._queue.put((step, values))

    def end(self) -> None:
        self._queue.put(None)

    def wait(self) -> None:
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._say(f"warning: logger {self._name} did not close within {CLOSE_S:g} s: metrics.jsonl is complete")

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            step, values = item
            self._try(f"at step {step}", partial(self._logger.log, step, values))
        self._try("when it was closed", self._logger.close)

    def _try(self, when: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a logger's package raises what it likes, and no run ends of it
            self.failures += 1
            if self.failures == 1:
                self._say(
                    f"warning: logger {self._name} failed {when}: {type(error).__name__}: {error}. Training continues, "
                    "metrics.jsonl is complete; shown once, loggers/failures counts all"
                )


_SHOWN_STEPS = 8


class LiveDisplay:
    """Progress of a run: a bar, and the last steps as a table.

    On a terminal it redraws in place; elsewhere (a file, CI) it prints a line per step. A context manager.

    Args:
        total: Number of steps; None where another limit ends the run.
        columns: Heading and metric of each column; missing metrics are left blank.
        console: By default standard error, which keeps standard output for results.
        done: Steps of earlier processes of the run.
        share_at_start: The share of the whole run before it, excluded from the time estimate.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        columns: Mapping[str, str],
        *,
        console: Console | None = None,
        done: int = 0,
        share_at_start: float = 0.0,
    ) -> None:
        self._title = title
        self._columns = dict(columns)
        self._console = console or Console(stderr=True)
        self._rows: deque[list[str]] = deque(maxlen=_SHOWN_STEPS)
        self._total = total
        self._share_at_start = share_at_start
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
        """Show the current activity (``rollout``, ``update``, ``evaluation``)."""
        self._status = text
        if self._live is not None:
            self._live.update(self._render())

    @property
    def redraws(self) -> bool:
        """Whether it is drawn on a terminal, in place."""
        return self._live is not None

    def report(self, text: str) -> None:
        """Show the current activity, elsewhere than on a terminal as a line."""
        self.status(text)
        if not self.redraws:
            self.say(f"{self._title} {text}")

    def say(self, text: str) -> None:
        """Print a permanent line above the display."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float], *, share: float | None = None) -> None:
        """Show the metrics of ``step``, the last finished one; ``share`` is the progress, by default of ``total``."""
        if share is None:
            share = step / self._total if self._total else 0.0
        cells = [str(step), *(_number(metrics.get(name)) for name in self._columns.values())]
        self._rows.append(cells)
        total = self._total if self._total is not None else round(step / share) if share else None
        self._progress.update(self._task, completed=step, total=total, left=self._time_left(share))
        if self._live is not None:
            self._live.update(self._render())
        else:
            pairs = "  ".join(f"{head} {cell}" for head, cell in zip(self._columns, cells[1:], strict=True) if cell)
            of = f"/{self._total}" if self._total is not None else f" ({min(share, 1):.0%})"
            self.say(f"{self._title} {step}{of}  {pairs}  {self._time_left(share)}".rstrip())

    def _time_left(self, share: float) -> str:
        if share <= self._share_at_start:
            return ""
        seconds_left = (time.monotonic() - self._started) / (share - self._share_at_start) * max(0.0, 1 - share)
        return f"{int(seconds_left // 60)}:{int(seconds_left % 60):02d} left"

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(self._progress)
        if self._rows:
            # A column without a value would only narrow the others.
            used = [bool(number == 0 or any(column)) for number, column in enumerate(zip(*self._rows, strict=True))]
            headings = compress(("step", *self._columns), used)
            table = Table(*headings, box=None, padding=(0, 1), header_style="bold")
            for cells in self._rows:
                table.add_row(*compress(cells, used))
            grid.add_row(table)
        if self._status:
            grid.add_row(f"[dim]{self._status}[/dim]")
        return grid


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
