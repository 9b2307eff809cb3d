"""Datasets as task sources: what :meth:`~turnwise.trainer.api.Trainer.fit` takes as rows."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson

from turnwise.append_file import private_directory, replace_file
from turnwise.errors import TaskError, shown
from turnwise.plugins import reference_to
from turnwise.tasks.config import SourceConfig
from turnwise.tasks.core import Task

Dataset: TypeAlias = "str | Path | SourceConfig | Iterable[Task | Mapping[str, Any]] | Callable[..., Any]"
"""A source as ``tasks:`` takes it (text, a :class:`~turnwise.tasks.config.SourceConfig`, a list of either, which is a
mix), a function at the top of a module that returns or yields rows, or rows: Tasks or dicts, of a list, a generator or
a Hugging Face dataset."""

MAX_ROWS: Final = 1_000_000
"""More rows are not copied into a file: an iterable without an end would never let the run begin."""


def task_config(dataset: Dataset, home: Path, *, name: str, whole_rows: bool = False) -> Any:
    """Return the ``tasks`` configuration of a dataset.

    Args:
        dataset: The dataset.
        home: Directory for rows in memory, written as ``datasets/NAME-DIGEST.jsonl``.
        name: The dataset's name.
        whole_rows: Whether rows are passed whole to the agent; one without a ``prompt`` then has an empty one.

    Raises:
        TaskError: A row is no Task or mapping, or is not JSON-serialisable; the message names row and field. Or there
            are no rows, or more than a million.
        ConfigError: A function cannot be imported by another process.
    """
    if isinstance(dataset, (str, Path)):
        return str(dataset)
    if isinstance(dataset, SourceConfig) or (isinstance(dataset, Mapping) and "source" in dataset):
        return dataset
    if isinstance(dataset, Mapping):
        raise TaskError(
            f"the {name} dataset is a mapping of {', '.join(map(repr, dataset)) or 'nothing'}: give one of its parts "
            "(dataset['train']), or a source with its keys ({'source': ...})"
        )
    if isinstance(dataset, (list, tuple)) and _is_mix(dataset):
        return list(dataset)
    if callable(dataset):
        _callable_without_arguments(dataset, name)
        return reference_to(dataset, f"{name} dataset")
    lines = [_line(row, f"{name} dataset: row {number}", whole_rows) for number, row in _rows(dataset, name)]
    if not lines:
        raise TaskError(f"the {name} dataset holds no row")
    content = b"\n".join(lines) + b"\n"
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    file = home / "datasets" / f"{name}-{digest}.jsonl"
    if not file.exists():
        private_directory(file.parent)
        replace_file(file, content)
    return str(file.absolute())


def _is_mix(dataset: Sequence[Any]) -> bool:
    """Whether a list holds sources instead of rows."""
    return bool(dataset) and all(
        isinstance(element, (str, Path, SourceConfig))
        or (isinstance(element, Mapping) and "source" in element and "prompt" not in element)
        for element in dataset
    )


def _callable_without_arguments(function: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TaskError(
            f"the {name} dataset is a function that cannot be called without arguments ({error}): give its rows, or "
            "its reference with arguments, as pkg.module:function?n=200"
        ) from error


def _rows(dataset: Any, name: str) -> Iterator[tuple[int, Any]]:
    try:
        rows = iter(dataset)
    except TypeError:
        raise TaskError(
            f"the {name} dataset is {shown(dataset)}: give rows (a list, a generator, a Hugging Face dataset), a "
            "function that returns them, or a source as tasks: takes it"
        ) from None
    for number, row in enumerate(rows):
        if number == MAX_ROWS:
            raise TaskError(
                f"the {name} dataset has more than {MAX_ROWS:,} rows, or no end: give the function that yields them "
                "itself, or a file, so that it is streamed"
            )
        yield number, row


def _line(row: Any, where: str, whole_rows: bool) -> bytes:
    if isinstance(row, Task):
        record: Mapping[str, Any] = row.to_record()
    elif isinstance(row, Mapping):
        record = {**row, "prompt": ""} if whole_rows and row.get("prompt") is None else row
    else:
        remedy = " (of a table, give its rows: frame.to_dict('records'))" if isinstance(row, str) else ""
        raise TaskError(f"{where} is {shown(row)}: a row is a turnwise.Task or a dict{remedy}")
    try:
        return orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        field = next((key for key, value in record.items() if not _is_json(value)), None)
        field_text = f": field {field!r} is {shown(record[field])}" if field is not None else ""
        raise TaskError(f"{where} cannot be written as JSON ({error}){field_text}") from error


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return False
    return True
