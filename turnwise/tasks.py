"""Tasks: the rows of a dataset, wherever they come from.

Owns: :class:`Task` and :func:`load_tasks` (jsonl, parquet, Hugging Face datasets on disk, Python generators). Refuses:
downloading anything, shuffling, and guessing: a row that cannot be read is an error that names file, row and field.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args
from urllib.parse import parse_qsl

import orjson

from turnwise.errors import ConfigError, MissingExtraError, TaskError, shown
from turnwise.references import load_object
from turnwise.types import Message, Role, ToolCall

TaskSource: TypeAlias = "str | Path | Iterable[Task | Mapping[str, Any]] | Callable[..., Any]"
_Row: TypeAlias = "tuple[str, str, Any]"  # where it stands, the id it gets without its own, the row itself

_ROLES = frozenset(get_args(Role))
_FIELDS = ("id", "prompt", "data", "env", "agent")
_CALL_FIELDS = frozenset(("id", "name", "arguments", "raw", "error"))


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a dataset.

    Attributes:
        id: Unique in its dataset; part of every seed, so keep it stable between runs.
        prompt: What the episode starts from: the user's text, or whole messages.
        data: What the environment needs to set the task up and to score it. Never shown to the model by itself.
        env: Registered name or reference of the environment, where it is not the run's.
        agent: The same for the agent.
    """

    id: str
    prompt: str | list[Message]
    data: dict[str, Any] = field(default_factory=dict)
    env: str | None = None
    agent: str | None = None

    def __hash__(self) -> int:
        return hash(self.id)

    def messages(self) -> list[Message]:
        """Return the prompt as a new list of messages; a text is one user message."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return list(self.prompt)

    def to_record(self) -> dict[str, Any]:
        """Return the row as JSON values; :meth:`from_record` reads it back."""
        prompt = self.prompt if isinstance(self.prompt, str) else [_message_record(each) for each in self.prompt]
        record: dict[str, Any] = {"id": self.id, "prompt": prompt, "data": self.data}
        if self.env is not None:
            record["env"] = self.env
        if self.agent is not None:
            record["agent"] = self.agent
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, where: str = "task", default_id: str | None = None) -> Task:
        """Read a row. Columns other than those of a task become entries of ``data``.

        Args:
            record: The row.
            where: Where it stands, for messages.
            default_id: The id of a row that has none.

        Raises:
            TaskError: A field is missing or of the wrong type; the message names it and what to write.
        """
        if not isinstance(record, Mapping):
            raise TaskError(f"{where}: a row is an object with the field 'prompt', not {_kind(record)}")
        data = _data(record, where)
        return cls(
            id=_id(record.get("id"), default_id, where),
            prompt=_prompt(record, where),
            data=data,
            env=_name(record, "env", where),
            agent=_name(record, "agent", where),
        )


def _message_record(message: Message) -> dict[str, Any]:
    record = cast("dict[str, Any]", dict(message))
    if message.get("tool_calls"):
        record["tool_calls"] = [asdict(call) for call in message["tool_calls"]]
    return record


def _id(value: Any, default: str | None, where: str) -> str:
    if value is None or value == "":
        if default is None:
            raise TaskError(f"{where}: field 'id' is missing: give every task a text that names it")
        return default
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TaskError(f"{where}: field 'id' is {shown(value)}: it must be a text or an integer")
    return str(value)


def _data(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    value = record.get("data")
    if value is not None and not isinstance(value, Mapping):
        raise TaskError(f"{where}: field 'data' is {shown(value)}: it must be an object (or be left out)")
    data = dict(value or {})
    for key, column in record.items():
        if not isinstance(key, str):
            raise TaskError(f"{where}: column {key!r} has a name that is no text")
        if key in _FIELDS:
            continue
        if key in data:
            raise TaskError(f"{where}: {key!r} is a column of the row and an entry of 'data' too: keep one of them")
        data[key] = column
    return data


def _name(record: Mapping[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise TaskError(f"{where}: field {key!r} is {shown(value)}: it must be a registered name or pkg.module:Class")
    return value


def _prompt(record: Mapping[str, Any], where: str) -> str | list[Message]:
    if record.get("prompt") is None:
        present = ", ".join(repr(key) for key in record) or "none"
        raise TaskError(
            f"{where}: field 'prompt' is missing (fields here: {present}): it is the user's text, or a list of messages"
        )
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, (list, tuple)) or not prompt:
        raise TaskError(f"{where}: field 'prompt' is {shown(prompt)}: it must be a text or a list of messages")
    return [_message(each, f"{where}: field 'prompt[{index}]'") for index, each in enumerate(prompt)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise TaskError(f"{where} is {shown(value)}: a message is an object with 'role' and 'content'")
    if value.get("role") not in _ROLES:
        raise TaskError(f"{where}.role is {shown(value.get('role'))}: allowed are {', '.join(sorted(_ROLES))}")
    content = value.get("content")
    if content is not None and not isinstance(content, (str, list)):
        raise TaskError(f"{where}.content is {shown(content)}: it must be a text or a list of parts")
    # Columnar files write every field that any row has: a null says no more than its absence.
    message = {key: item for key, item in value.items() if item is not None or key == "content"}
    if message.get("tool_calls"):
        if not isinstance(value["tool_calls"], (list, tuple)):
            raise TaskError(f"{where}.tool_calls is {shown(value['tool_calls'])}: it must be a list of calls")
        message["tool_calls"] = [_call(each, f"{where}.tool_calls[{n}]") for n, each in enumerate(value["tool_calls"])]
    return cast("Message", message)


def _call(value: Any, where: str) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    known = isinstance(value, Mapping) and set(value) <= _CALL_FIELDS
    if not known or not isinstance(value.get("name"), str) or not isinstance(value.get("arguments", {}), Mapping):
        raise TaskError(
            f'{where} is {shown(value)}: write {{"id": text, "name": text, "arguments": object}}, '
            "with the arguments as an object and not as JSON text"
        )
    return ToolCall(
        id=str(value.get("id") or ""),
        name=value["name"],
        arguments=dict(value.get("arguments", {})),
        raw=str(value.get("raw") or ""),
        error=value.get("error"),
    )


def load_tasks(source: TaskSource, *, limit: int | None = None, **arguments: Any) -> list[Task]:
    """Load tasks from wherever they are.

    Args:
        source: One of

            - ``rows.jsonl``: one JSON object per line;
            - ``rows.parquet`` (extra ``parquet``);
            - a directory that ``datasets`` wrote or can read, ``directory:split`` where it has several splits
              (extra ``datasets``);
            - ``pkg.module:function`` or ``path/file.py:function``, which returns tasks or rows when it is called.
              Its arguments may follow as ``?n=200&split=test``;
            - such a function itself, or any iterable of tasks and rows.
        limit: Take at most this many.
        **arguments: For functions: what they are called with.

    Returns:
        The tasks, in the order of the source. A row without an id gets one from its number, which does not depend
        on ``limit``.

    Raises:
        TaskError: Nothing can be read there, a row is malformed, or two rows have the same id.
        MissingExtraError: The package that reads this kind of source is not installed.
    """
    if limit is not None and limit < 0:
        raise TaskError(f"limit is {limit}: it must be 0 or more (or None for all rows)")
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for where, default_id, row in itertools.islice(_rows(source, arguments), limit):
        task = row if isinstance(row, Task) else Task.from_record(row, where=where, default_id=default_id)
        if task.id in places:
            raise TaskError(
                f"{where}: the id {task.id!r} was given before ({places[task.id]}): ids must be unique in a dataset"
            )
        places[task.id] = where
        tasks.append(task)
    return tasks


def _rows(source: TaskSource, arguments: dict[str, Any]) -> Iterator[_Row]:
    if isinstance(source, (str, Path)):
        text = str(source)
        path = Path(text).expanduser()
        directory, _, split = text.rpartition(":")
        is_file_like = path.suffix in (".jsonl", ".ndjson", ".parquet") or path.exists()
        if not is_file_like and directory and not Path(directory).expanduser().is_dir():
            return _referred(text, arguments)
        if arguments:
            raise TaskError(f"{text}: arguments ({', '.join(arguments)}) are for functions; a file takes none")
        if not is_file_like and directory:
            return _dataset(Path(directory).expanduser(), split)
        return _file(path)
    if callable(source):
        return _called(source, _callable_name(source), arguments)
    if arguments:
        raise TaskError(f"arguments ({', '.join(arguments)}) are for functions; an iterable takes none")
    return _iterated(source, "task")


def _file(path: Path) -> Iterator[_Row]:
    if path.is_dir():
        return _dataset(path, None)
    if not path.exists():
        raise TaskError(f"{path}: there is no such file or directory")
    if path.suffix in (".jsonl", ".ndjson"):
        return _jsonl(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise TaskError(
        f"{path}: files of type {path.suffix!r} are not read: use .jsonl, .parquet, a directory of a Hugging Face "
        "dataset, or pkg.module:function"
    )


def _jsonl(path: Path) -> Iterator[_Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            where = f"{path}:{number + 1}"
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise TaskError(f"{where}: this line is not JSON ({error}): write one JSON object per line") from error
            yield where, f"{path.stem}-{number}", row


def _parquet(path: Path) -> Iterator[_Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", f"reading {path}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", f"{path.stem}-{number}", row
                    number += 1
    except pyarrow.ArrowInvalid as error:
        raise TaskError(f"{path}: not a parquet file that can be read: {error}") from error


def _dataset(path: Path, split: str | None) -> Iterator[_Row]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "datasets", f"reading the directory {path}") from error
    saved = any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise TaskError(f"{path}: not a Hugging Face dataset that can be read: {error}") from error
    if isinstance(found, dict):
        names = ", ".join(sorted(found))
        if split is None and len(found) > 1:
            raise TaskError(f"{path}: this dataset has several splits ({names}): write {path}:{sorted(found)[0]}")
        if split is not None and split not in found:
            raise TaskError(f"{path}: there is no split {split!r}: it has {names}")
        found = found[split if split is not None else next(iter(found))]
    elif split is not None:
        raise TaskError(f"{path}: this dataset has no splits: leave ':{split}' out")
    stem = path.name if split is None else f"{path.name}-{split}"
    for number, row in enumerate(found):
        yield f"{path}: row {number}", f"{stem}-{number}", row


def _referred(text: str, arguments: dict[str, Any]) -> Iterator[_Row]:
    reference, _, query = text.partition("?")
    try:
        function = load_object(reference, "task source")
    except ConfigError as error:
        raise TaskError(str(error)) from error
    given = {key: _query_value(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    if not callable(function):
        if given or arguments:
            raise TaskError(f"{reference} is {_kind(function)}, which takes no arguments")
        if isinstance(function, str) or not isinstance(function, Iterable):
            raise TaskError(f"{reference} is {_kind(function)}: it must be a function or a collection of tasks")
        return _iterated(function, reference.rpartition(":")[2])
    return _called(function, reference, given | arguments)


def _query_value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _called(function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Iterator[_Row]:
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise TaskError(
            f"{name} cannot be called with ({shown}): {error}; its signature is {_signature(function)}"
        ) from error
    found = function(**arguments)
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise TaskError(f"{name} returned {_kind(found)}: it must return or yield tasks")
    return _iterated(found, name.rpartition(":")[2].rpartition(".")[2])


def _signature(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "unknown"


def _callable_name(function: Callable[..., Any]) -> str:
    return function.__qualname__ if inspect.isroutine(function) else type(function).__qualname__


def _iterated(rows: Iterable[Task | Mapping[str, Any]], name: str) -> Iterator[_Row]:
    for number, row in enumerate(rows):
        yield f"{name}: row {number}", f"{name}-{number}", row


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
