"""Rows of Hugging Face datasets: folders that ``datasets`` wrote or can read, and datasets of the hub."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from turnwise.errors import MissingExtraError, TaskError
from turnwise.tasks.sources import HUB, Row, Rows, choose_split, query_arguments


class _DatasetRows(Rows):
    """A dataset that is opened when it is read.

    Args:
        place: What it is called in messages.
        name: What its rows are called after, without the split.
        split: Which split, or None for the only one.
    """

    def __init__(self, place: str, name: str, split: str | None) -> None:
        self.name = name if split is None else f"{name}-{split}"
        self._place = place
        self._split = split

    def read(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows from a number on."""
        try:
            import datasets
            import pyarrow
        except ImportError as error:
            raise MissingExtraError("datasets", "datasets", f"reading {self._place}") from error
        # What the network, a builder and the files raise: of this package's own errors none is among them.
        failures = (OSError, ValueError, TypeError, pyarrow.ArrowException, datasets.exceptions.DatasetsError)
        number = None
        try:
            found = self._chosen(self._open(datasets))
            for number, value in enumerate(_from(found, start), start):
                yield Row(number, f"{self._place}: row {number}", f"{self.name}-{number}", value)
        except failures as error:
            after = "" if number is None else f" after row {number}"
            raise TaskError(f"{self._place}: not a Hugging Face dataset that can be read{after}: {error}") from error

    def _chosen(self, found: Any) -> Any:
        if isinstance(found, dict):
            return found[choose_split(self._place, list(found), self._split)]
        if self._split is not None:
            raise TaskError(f"{self._place}: this dataset has no splits: leave ':{self._split}' out")
        return found

    @abstractmethod
    def _open(self, datasets: Any) -> Any:
        """Return the dataset, or its splits by name. ``datasets`` is the package."""


class FolderRows(_DatasetRows):
    """A folder that ``datasets`` wrote (``save_to_disk``) or finds data files in."""

    def __init__(self, path: Path, split: str | None) -> None:
        super().__init__(str(path), path.name, split)
        self._path = path

    def _open(self, datasets: Any) -> Any:
        saved = any((self._path / name).exists() for name in ("dataset_info.json", "dataset_dict.json", "state.json"))
        if saved:
            return datasets.load_from_disk(str(self._path))
        return datasets.load_dataset(str(self._path), streaming=True)


class HubRows(_DatasetRows):
    """``hf://owner/name``, with ``:split`` and with arguments of ``load_dataset`` (``?name=main&revision=...``)."""

    def __init__(self, source: str) -> None:
        address, _, query = source.removeprefix(HUB).partition("?")
        repository, _, split = address.partition(":")
        if not repository:
            raise TaskError(f"{source}: no dataset is named: write {HUB}owner/name:split")
        super().__init__(f"{HUB}{repository}", repository.rpartition("/")[2], split or None)
        self._repository = repository
        self._arguments: Mapping[str, Any] = query_arguments(query)

    def _open(self, datasets: Any) -> Any:
        return datasets.load_dataset(self._repository, streaming=True, **self._arguments)


def _from(found: Any, start: int) -> Any:
    """Return the rows from a number on. A dataset that knows its length refuses to skip all of its rows."""
    if not start:
        return found
    return () if isinstance(found, Sized) and start >= len(found) else found.skip(start)
