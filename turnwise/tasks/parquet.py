"""Rows of parquet files, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.errors import MissingExtraError, TaskError
from turnwise.tasks.sources import Row, Rows

BATCH = 1024


class ParquetRows(Rows):
    """The rows of one file, numbered from 0."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.name = name or path.stem
        self._path = path

    def read(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows from a number on; row groups that end before it are not read."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise MissingExtraError("pyarrow", "parquet", f"reading {self._path}") from error
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                number, first = 0, 0
                while first < file.num_row_groups and number + _length(file, first) <= start:
                    number += _length(file, first)
                    first += 1
                groups = range(first, file.num_row_groups)
                for batch in file.iter_batches(batch_size=BATCH, row_groups=list(groups)) if groups else ():
                    skip = min(max(start - number, 0), batch.num_rows)
                    for at, value in enumerate(batch.slice(skip).to_pylist(), number + skip):
                        yield Row(at, f"{self._path}: row {at}", f"{self.name}-{at}", value)
                    number += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise TaskError(f"{self._path}: not a parquet file that can be read: {error}") from error


def _length(file: Any, group: int) -> int:
    return int(file.metadata.row_group(group).num_rows)
