"""What a run logs to: its file of JSON lines, and loggers that can be slow or fail.

Owns: :class:`RunLog`, the threads between a run and its loggers, and what a failing one costs (nothing but a line and a
count). Refuses: waiting for a logger while the run trains.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise.append import writing
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.trainer.loggers.core import LoggedRun, Logger, LoggerConfig, chosen_logger, find_logger
from turnwise.trainer.loggers.jsonl import JSONLLogger
from turnwise.trainer.metrics import figures

METRICS_FILE = "metrics.jsonl"
CLOSE_S = 30.0
"""Seconds that a logger may take at the end to send what it was given."""


def check_loggers(configs: Sequence[LoggerConfig]) -> None:
    """See that the packages of all loggers are there.

    Raises:
        MissingExtraError: One is not installed.
    """
    for config in configs:
        find_logger(config.name).check()


class RunLog(JSONLLogger):
    """Appends records to ``metrics.jsonl``, and hands their figures to loggers.

    The record is in the file when :meth:`log` returns; loggers get it in threads of their own.

    Args:
        path: The file.
        loggers: By the names that messages use.
        say: Tells a person that one failed.
    """

    def __init__(
        self, path: Path, loggers: Mapping[str, Logger] | None = None, say: Callable[[str], object] = print
    ) -> None:
        super().__init__(path)
        self._outlets = [_Outlet(name, logger, say) for name, logger in (loggers or {}).items()]

    @classmethod
    def open(cls, run: LoggedRun, loggers: Sequence[LoggerConfig], console: Console, *, part: int = 0) -> RunLog:
        """Open the log of a run, and make its loggers.

        Args:
            run: What is logged.
            loggers: Where to, besides the file.
            console: Where a person is told.
            part: Number of this process among those that work on the run.

        Raises:
            ConfigError: A logger cannot be made.
            DiskError: The disk refuses.
        """
        say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        with writing(run.directory):
            run.directory.mkdir(parents=True, exist_ok=True)
        made: dict[str, Logger] = {}
        for number, each in enumerate(loggers):
            name = each.name if each.name not in made else f"{each.name} ({number})"
            try:
                made[name] = chosen_logger(each)(run)
            except TurnwiseError:
                raise
            except Exception as error:  # whatever a logger's package raises is named
                raise ConfigError(
                    f"loggers.{number} ({each.name}) cannot be opened: {type(error).__name__}: {error}; correct its "
                    "config, or take it out: metrics.jsonl has everything without it"
                ) from error
        log = cls(run.directory / METRICS_FILE, made, say)
        log.log({"kind": "start", "part": part, "step": run.step})
        return log

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record, and hand on the figures of a step or an evaluation."""
        super().log(record)
        if self._outlets and (found := figures(record)):
            for each in self._outlets:
                each.put(int(record["step"]), found)

    def counts(self) -> dict[str, float]:
        """Return how many calls of loggers failed so far, as a metric, where some did."""
        failures = sum(each.failures for each in self._outlets)
        return {"loggers/failures": float(failures)} if failures else {}

    def close(self) -> None:
        """Close the file and the loggers, each of which gets :data:`CLOSE_S`. Closing twice is no error."""
        super().close()
        outlets, self._outlets = self._outlets, []
        for each in outlets:
            each.end()
        for each in outlets:
            each.wait()


class _Outlet:
    """One logger, in a thread of its own."""

    def __init__(self, name: str, logger: Logger, say: Callable[[str], object]) -> None:
        self._name = name
        self._logger = logger
        self._say = say
        self._queue: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self.failures = 0
        # A daemon: a logger that hangs keeps no process from ending.
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, found: Mapping[str, float]) -> None:
        self._queue.put((step, found))

    def end(self) -> None:
        self._queue.put(None)

    def wait(self) -> None:
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._say(f"warning: logger {self._name} did not end within {CLOSE_S:g} s: metrics.jsonl has what it lacks")

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            step, found = item
            self._try(f"at step {step}", partial(self._logger.log, step, found))
        self._try("when it was closed", self._logger.close)

    def _try(self, when: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a logger's package raises what it likes, and no run ends of it
            self.failures += 1
            if self.failures == 1:
                self._say(
                    f"warning: logger {self._name} failed {when}: {type(error).__name__}: {error}. Training goes on, "
                    "metrics.jsonl has everything; this is said once, loggers/failures counts"
                )
