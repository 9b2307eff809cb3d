r"""A logger that writes the figures of runs into an SQLite database, several runs into one if you like:

turnwise train examples/lookup/train.yaml 'loggers=[{name: examples/extensions/logger.py:SQLiteLogger}]'
sqlite3 runs/NAME/figures.db "SELECT step, value FROM figures WHERE name = 'reward/mean' ORDER BY step"
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated

from pydantic import Field

from turnwise.errors import TrainError
from turnwise.trainer.observe.loggers import LoggedRun, Logger, register_logger

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, name TEXT NOT NULL, config TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS figures (
    run TEXT NOT NULL REFERENCES runs (id), step INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (run, name, step)
) WITHOUT ROWID;
"""


@register_logger("sqlite")
class SQLiteLogger(Logger):
    """Writes a row for each figure of each step: run, step, name, value.

    Args:
        run: The run.
        file: The database, created if missing; by default ``figures.db`` in the run's directory.
        wait: Seconds to wait for another run that writes to the same database.
    """

    def __init__(self, run: LoggedRun, *, file: str | None = None, wait: Annotated[float, Field(gt=0)] = 30.0) -> None:
        self.file = run.directory / "figures.db" if file is None else Path(file).expanduser()
        self._run = run.id
        try:
            # It is made in the trainer's thread, and used in the logger's.
            self._database = sqlite3.connect(self.file, timeout=wait, check_same_thread=False)
            self._database.executescript(_TABLES)
            with self._database:
                row = (run.id, run.name, json.dumps(run.config, default=str))
                self._database.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", row)
                # An earlier process got further than the checkpoint that this one resumes from.
                self._database.execute("DELETE FROM figures WHERE run = ? AND step > ?", (run.id, run.step))
        except sqlite3.Error as error:
            raise TrainError(f"loggers.config.file is {self.file}: {error}; name a file that can be written") from error

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step, in the place of earlier ones of the same name."""
        rows = [(self._run, step, name, value) for name, value in figures.items() if math.isfinite(value)]
        with self._database:
            self._database.executemany("INSERT OR REPLACE INTO figures VALUES (?, ?, ?, ?)", rows)

    def close(self) -> None:
        """Close the database."""
        self._database.close()


def curve(file: Path | str, name: str, *, run: str | None = None) -> list[tuple[int, float]]:
    """Return (step, value) of a figure, of the run with this name or of all."""
    query = "SELECT step, value FROM figures JOIN runs ON runs.id = figures.run WHERE figures.name = ?"
    query += "" if run is None else " AND runs.name = ?"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        return database.execute(f"{query} ORDER BY step", (name, *(() if run is None else (run,)))).fetchall()
