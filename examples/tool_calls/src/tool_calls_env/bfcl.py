"""Rows of BFCL, the Berkeley Function Calling Leaderboard: questions and functions, with answers in a file beside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from turnwise.errors import TaskError, shown
from turnwise.tasks.formats import RowFormat
from turnwise.tasks.sources import JsonlRows

BFCL: Final = RowFormat(
    "tool_calls", "tool_calls_env.bfcl:row", ("id", "question", "function"), "tool_calls_env.bfcl:rows"
)
"""``format: bfcl``, where this package is installed."""

_ANSWERS: Final = "possible_answer"
_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array", "list": "array"}
_PLAIN: Final = ("object", "array", "string", "integer", "number", "boolean", "null")
_NESTED: Final = ("properties", "items", "additionalProperties")


def rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file such as ``BFCL_v4_simple_python.json``, each with its answers as ``ground_truth``.

    Args:
        path: The file: one object per line. Answers are in ``possible_answer/`` beside it, in a file of the same name;
            the categories of relevance have none.

    Raises:
        TaskError: A file cannot be read.
    """
    file = Path(path).expanduser()
    answers = file.parent / _ANSWERS / file.name
    answer_by_id = (
        {answer.get("id"): answer.get("ground_truth") for answer in _lines(answers)} if answers.is_file() else {}
    )
    for record in _lines(file):
        answer = answer_by_id.get(record.get("id"))
        yield record if answer is None else {**record, "ground_truth": answer}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in JsonlRows(file).read():
        if not isinstance(line.value, dict):
            raise TaskError(f"{line.where}: {shown(line.value)} is no row: BFCL has an object on each line")
        yield line.value


def row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task columns of a row of one turn: the target of ``format: bfcl``.

    Args:
        record: ``id``, ``question`` (turns of messages), ``function`` (schemas), and ``ground_truth``, a list of
            ``{name: {argument: [allowed values]}}``, which rows of relevance do without.
    """
    name = str(record["id"])
    if record.get("involved_classes") is not None:
        raise TaskError("column 'involved_classes': rows of several turns run BFCL's own classes, which are not here")
    schemas = [_schema(schema) for schema in _several(record, "function")]
    return {
        "id": name,
        "prompt": _prompt(record["question"]),
        "data": {"functions": schemas, **_expected_calls(name, record)},
    }


def _expected_calls(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    if record.get("ground_truth") is not None:
        return {"calls": [_call(call) for call in _several(record, "ground_truth")]}
    if "irrelevance" in name:
        return {"calls": []}
    if "relevance" in name:
        return {"any_call": True}
    raise TaskError(
        f"column 'ground_truth' is missing: it is in the folder {_ANSWERS!r} beside the file of questions, or a column "
        "of rows that were joined with it"
    )


def _several(record: Mapping[str, Any], column: str) -> list[Any]:
    value = record.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise TaskError(f"column {column!r} is {shown(value)}, which is not JSON: {error}") from error
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TaskError(f"column {column!r} is {shown(value)}: it must be a list of objects")
    return list(value)


def _prompt(question: Any) -> list[Any]:
    turns = question if isinstance(question, list) else [question]
    if len(turns) == 1 and isinstance(turns[0], list):
        return list(turns[0])
    if turns and all(isinstance(turn, Mapping) for turn in turns):
        return turns
    if len(turns) == 1 and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    raise TaskError(f"column 'question' has {len(turns)} turns: rows of one turn are supported, [[{{role, content}}]]")


def _call(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or len(value) != 1:
        raise TaskError(f"column 'ground_truth' has {shown(value)}: it must be {{name: {{argument: [values]}}}}")
    [(name, arguments)] = value.items()
    if not isinstance(arguments, Mapping) or not all(isinstance(values, list) for values in arguments.values()):
        raise TaskError(f"column 'ground_truth': arguments of {name} are {shown(arguments)}: each has a list of values")
    return {"name": tool_name(str(name)), "allowed": dict(arguments)}


def tool_name(name: str) -> str:
    """Return a function's name as a tool's, which has no dots."""
    return name.replace(".", "_")


def _schema(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise TaskError(f"column 'function' has {shown(value)}: it must have a name, a description and parameters")
    parameters = value.get("parameters") or {"type": "dict", "properties": {}}
    where = f"column 'function': {value['name']}"
    return {
        "name": tool_name(value["name"]),
        "description": str(value.get("description") or ""),
        "parameters": _typed(parameters, where),
    }


def _typed(schema: Any, where: str) -> Any:
    """Return a schema with the types of JSON schema in place of those of Python."""
    if not isinstance(schema, Mapping):
        return schema
    typed = dict(schema)
    kind = typed.get("type")
    if kind == "any":
        del typed["type"]
    elif isinstance(kind, str):
        typed["type"] = _TYPES.get(kind, kind)
        if typed["type"] not in _PLAIN:
            raise TaskError(f"{where} has the type {kind!r}: categories of Python are supported, not Java's or others")
    for key in _NESTED:
        nested = typed.get(key)
        if key == "properties" and isinstance(nested, Mapping):
            typed[key] = {name: _typed(subschema, f"{where}.{name}") for name, subschema in nested.items()}
        elif isinstance(nested, Mapping):
            typed[key] = _typed(nested, where)
    # A default of null, or "optional", restricts nothing and is no keyword of the schema of some types.
    typed.pop("optional", None)
    return typed
