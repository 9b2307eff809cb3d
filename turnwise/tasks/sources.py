"""Row sources: JSON lines, functions, iterables and folders, read as streams of rows."""

from __future__ import annotations

import codecs
import inspect
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

import orjson

from turnwise.errors import ConfigError, TaskError, requires_extra, user_code
from turnwise.plugins import load_object
from turnwise.tasks.core import Task, kind

TaskSource: TypeAlias = "str | Path | Iterable[Task | Mapping[str, Any]] | Callable[..., Any]"
HUB = "hf://"

_LINES = (".jsonl", ".ndjson")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


class Row(NamedTuple):
    """One row: an increasing, reproducible number, its location for error messages, a default id, the value.

    ``folder`` is that of its file, where relative paths in it begin; None for rows without one.
    """

    number: int
    where: str
    id: str
    value: Any
    folder: Path | None = None


class Rows(ABC):
    """A source that can be read repeatedly in bounded memory.

    Attributes:
        name: Name in metrics and messages.
        may_be_endless: Whether its length is unknown and possibly infinite.
    """

    name: str
    may_be_endless: bool = False

    @abstractmethod
    def read(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows numbered ``start`` and above. Raises TaskError or MissingExtraError."""


class JsonlRows(Rows):
    """Lines of JSON, numbered by line from 0."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.name = name or path.stem
        self._path = path

    def read(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows from a line on; blank lines are counted and skipped."""
        try:
            lines = self._path.open("rb")
        except OSError as error:
            raise TaskError(f"{self._path}: cannot be read: {error.strerror or error}") from error
        with lines:
            for number, line in enumerate(lines):
                if number < start or not line.strip():
                    continue
                where = f"{self._path}:{number + 1}"
                try:
                    # Some editors begin a file with a byte order mark.
                    value = orjson.loads(line.removeprefix(codecs.BOM_UTF8) if number == 0 else line)
                except orjson.JSONDecodeError as error:
                    raise TaskError(
                        f"{where}: this line is not JSON ({error}): write one JSON object per line, in UTF-8"
                    ) from error
                yield Row(number, where, f"{self.name}-{number}", value, self._path.parent)


class FunctionRows(Rows):
    """The rows that a function returns or yields; ``start`` is passed to such a parameter, else rows are skipped."""

    may_be_endless = True

    def __init__(self, function: Callable[..., Any], reference: str, arguments: Mapping[str, Any]) -> None:
        try:
            signature = inspect.signature(function)
            signature.bind(**arguments)
        except (TypeError, ValueError) as error:
            argument_text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            raise TaskError(
                f"{reference} cannot be called with ({argument_text}): {error}; its signature is {_signature(function)}"
            ) from error
        self.name = reference.rpartition(":")[2].rpartition(".")[2]
        self._function = function
        self._reference = reference
        self._arguments = dict(arguments)
        self._starts = "start" in signature.parameters and "start" not in arguments

    def read(self, start: int = 0) -> Iterator[Row]:
        """Call the function and yield its rows."""
        skip = 0 if self._starts else start
        arguments = {**self._arguments, "start": start} if self._starts and start else self._arguments
        collection = self._call_user(lambda: self._function(**arguments), "")
        if isinstance(collection, (str, Mapping)) or not isinstance(collection, Iterable):
            raise TaskError(f"{self._reference} returned {kind(collection)}: it must return or yield tasks")
        rows = iter(collection)
        end = object()
        for number in itertools.count(start - skip):
            value = self._call_user(lambda: next(rows, end), f": row {number}")
            if value is end:
                return
            if number >= start:
                yield Row(number, f"{self.name}: row {number}", f"{self.name}-{number}", value)

    def _call_user(self, call: Callable[[], Any], where: str) -> Any:
        with user_code(TaskError, f"{self._reference}{where}: it raised"):
            return call()


class IterableRows(Rows):
    """A collection of tasks and rows; an iterator can be read only once."""

    may_be_endless = True

    def __init__(self, rows: Iterable[Task | Mapping[str, Any]], name: str = "task") -> None:
        self.name = name
        self._rows = rows
        self._read = False

    def read(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows."""
        if self._read and isinstance(self._rows, Iterator):
            raise TaskError(
                f"{self.name} is an iterator, which can be read only once: give the function that makes it, or a list"
            )
        self._read = True
        for number, row in enumerate(self._rows):
            if number >= start:
                yield Row(number, f"{self.name}: row {number}", f"{self.name}-{number}", row)


class ChainedRows(Rows):
    """Shards of a split, read as one source."""

    def __init__(self, parts: list[Path], name: str) -> None:
        self.name = name
        self._parts = parts

    def read(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows of all files, numbered consecutively."""
        number = 0
        for path in self._parts:
            for row in _rows_of(path, self.name).read():
                if number >= start:
                    yield row._replace(number=number, id=f"{self.name}-{number}")
                number += 1


def open_rows(source: TaskSource, arguments: Mapping[str, Any]) -> Rows:
    """Open a source of :func:`~turnwise.tasks.reader.load_tasks` without reading it. Raises TaskError."""
    if isinstance(source, (str, Path)):
        return _open_text(str(source), arguments)
    if callable(source):
        named = source if inspect.isroutine(source) else type(source)
        return FunctionRows(source, named.__qualname__, arguments)
    if arguments:
        raise TaskError(f"arguments ({', '.join(arguments)}) are for functions; an iterable takes none")
    return IterableRows(source)


def is_table(source: str) -> bool:
    """Whether a source is a table of rows by its name: of a hub, a function's, lines of JSON or parquet."""
    return source.startswith(HUB) or "?" in source or Path(source).suffix in (*_LINES, ".parquet")


def _open_text(text: str, arguments: Mapping[str, Any]) -> Rows:
    path = Path(text).expanduser()
    # The arguments of a function may name a file themselves, and hold colons.
    reference = text.partition("?")[0]
    if "?" in text and ":" in reference and not path.exists() and not text.startswith(HUB):
        return _open_reference(text, arguments)
    head, _, split = text.rpartition(":")
    is_hub = text.startswith(HUB)
    is_file_like = not is_hub and (path.suffix in (*_LINES, ".parquet") or path.exists())
    in_folder = bool(head) and not is_hub and not is_file_like and Path(head).expanduser().is_dir()
    if head and Path(head).suffix in (*_LINES, ".parquet") and Path(head).expanduser().is_file():
        raise TaskError(f"{text}: {head} is a file, which has no splits: remove ':{split}', or name its folder")
    if head and not (is_hub or is_file_like or in_folder):
        return _open_reference(text, arguments)
    if arguments:
        raise TaskError(f"{text}: arguments ({', '.join(arguments)}) are for functions; a file takes none")
    if is_hub:
        return HubRows(text)
    if in_folder:
        return _open_folder(Path(head).expanduser(), split)
    if path.is_dir():
        return _open_folder(path, None)
    if not path.exists():
        raise TaskError(f"{path}: there is no such file or directory")
    return _rows_of(path)


def _rows_of(path: Path, name: str | None = None) -> Rows:
    if path.suffix in _LINES:
        return JsonlRows(path, name=name)
    if path.suffix == ".parquet":
        return ParquetRows(path, name=name)
    raise TaskError(
        f"{path}: files of type {path.suffix!r} are not supported: use .jsonl, .parquet, a directory of a Hugging Face "
        "dataset, or pkg.module:function"
    )


def _open_folder(path: Path, split: str | None) -> Rows:
    """Return a split of a folder: files named after splits, else what ``datasets`` finds."""
    splits: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir()):
        if file.suffix in (*_LINES, ".parquet"):
            splits.setdefault(_SHARD.sub("", file.stem), []).append(file)
    # With a card, or as datasets saved it, the folder itself maps files to splits.
    if not splits or (path / "README.md").exists():
        return FolderRows(path, split)
    chosen_split = choose_split(str(path), list(splits), split)
    name = f"{path.name}-{chosen_split}" if split is not None else path.name
    parts = splits[chosen_split]
    return _rows_of(parts[0], name) if len(parts) == 1 else ChainedRows(parts, name)


def choose_split(source: str, splits: list[str], split: str | None) -> str:
    """Return the requested split, or the only one; raise TaskError otherwise."""
    names = ", ".join(sorted(splits))
    if split is None and len(splits) > 1:
        raise TaskError(f"{source}: this dataset has several splits ({names}): write {source}:{sorted(splits)[0]}")
    if split is not None and split not in splits:
        raise TaskError(f"{source}: there is no split {split!r}: the splits are {names}")
    return splits[0] if split is None else split


def _open_reference(text: str, arguments: Mapping[str, Any]) -> Rows:
    reference, _, query = text.partition("?")
    try:
        target = load_object(reference, "task source")
    except ConfigError as error:
        raise TaskError(str(error)) from error
    merged = {**query_arguments(query), **arguments}
    if callable(target):
        return FunctionRows(target, reference, merged)
    if merged:
        raise TaskError(f"{reference} is {kind(target)}, which takes no arguments")
    if isinstance(target, (str, Mapping)) or not isinstance(target, Iterable):
        raise TaskError(f"{reference} is {kind(target)}: it must be a function or a collection of tasks")
    return IterableRows(target, reference.rpartition(":")[2])


def query_arguments(query: str) -> dict[str, Any]:
    """Parse ``n=200&split=test`` to arguments; values that are JSON are decoded."""
    return {key: _query_value(value) for key, value in parse_qsl(query, keep_blank_values=True)}


def _query_value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _signature(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "unknown"


BATCH = 1024


class ParquetRows(Rows):
    """The rows of one file, numbered from 0."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.name = name or path.stem
        self._path = path

    def read(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows from a number on; row groups that end before it are not read."""
        with requires_extra("pyarrow", "parquet", f"reading {self._path}"):
            import pyarrow
            import pyarrow.parquet
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
                        yield Row(at, f"{self._path}: row {at}", f"{self.name}-{at}", value, self._path.parent)
                    number += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise TaskError(f"{self._path}: cannot be read as a parquet file: {error}") from error


def _length(file: Any, group: int) -> int:
    return int(file.metadata.row_group(group).num_rows)


class _DatasetRows(Rows):
    """A dataset that is opened when it is read.

    Args:
        label: Its name in messages.
        name: Prefix of its rows' ids, without the split.
        split: Which split, or None for the only one.
    """

    def __init__(self, label: str, name: str, split: str | None) -> None:
        self.name = name if split is None else f"{name}-{split}"
        self._label = label
        self._split = split

    def read(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows from a number on."""
        with requires_extra("datasets", "datasets", f"reading {self._label}"):
            import datasets
            import pyarrow
        # What the network, a builder and the files raise: of this package's own errors none is among them.
        failures = (OSError, ValueError, TypeError, pyarrow.ArrowException, datasets.exceptions.DatasetsError)
        number = None
        try:
            dataset = self._choose(self._open(datasets))
            for number, value in enumerate(_rows_from(dataset, start), start):
                yield Row(number, f"{self._label}: row {number}", f"{self.name}-{number}", value)
        except failures as error:
            position = "" if number is None else f" after row {number}"
            raise TaskError(f"{self._label}: cannot be read as a Hugging Face dataset{position}: {error}") from error

    def _choose(self, dataset: Any) -> Any:
        if isinstance(dataset, dict):
            return dataset[choose_split(self._label, list(dataset), self._split)]
        if self._split is not None:
            raise TaskError(f"{self._label}: this dataset has no splits: remove ':{self._split}'")
        return dataset

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
            raise TaskError(f"{source}: the dataset's name is missing: write {HUB}owner/name:split")
        super().__init__(f"{HUB}{repository}", repository.rpartition("/")[2], split or None)
        self._repository = repository
        self._arguments: Mapping[str, Any] = query_arguments(query)

    def _open(self, datasets: Any) -> Any:
        return datasets.load_dataset(self._repository, streaming=True, **self._arguments)


def _rows_from(dataset: Any, start: int) -> Any:
    """Return the rows from a number on. A dataset that knows its length refuses to skip all of its rows."""
    if not start:
        return dataset
    return () if isinstance(dataset, Sized) and start >= len(dataset) else dataset.skip(start)
