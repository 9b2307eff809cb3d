"""What is wrong with a configuration, in words: where, what stands there, and what may.

Owns: the report of everything that pydantic found, with the nearest known key for an unknown one. Refuses: reading,
merging and checking, which belong to :mod:`turnwise.config`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from turnwise.errors import shown

Keys: TypeAlias = "tuple[str | int, ...]"
"""The path of one value in a configuration: keys of sections and indices of lists."""


@dataclass(slots=True)
class _Problem:
    """What is wrong at one place; several alternatives of a union are one problem."""

    value: Any
    unknown: bool
    missing: bool
    allowed: list[str]


def report_problems(
    model: type[BaseModel], data: Any, origins: Mapping[Keys, str], errors: Sequence[ErrorDetails]
) -> str:
    """Return one line per wrong place.

    Args:
        model: The class that says what is allowed.
        data: What was checked against it.
        origins: Where a value was said ("run.yaml:3"), by its path or the path of a section around it.
        errors: What pydantic found, without its URLs.
    """
    problems: dict[Keys, _Problem] = {}
    for error in errors:
        kind = error["type"]
        keys = _path_in(data, error["loc"], kind)
        problem = problems.setdefault(keys, _Problem(error["input"], kind == "extra_forbidden", kind == "missing", []))
        if (text := _allowed(error)) not in problem.allowed:
            problem.allowed.append(text)
    lines = [_line(model, keys, problem, origins) for keys, problem in problems.items()]
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} problems in the configuration:\n" + "\n".join(f"  {line}" for line in lines)


def _path_in(data: Any, loc: tuple[str | int, ...], kind: str) -> Keys:
    """Return ``loc`` without the labels that pydantic puts in for members of a union."""
    keys: list[str | int] = []
    for position, key in enumerate(loc):
        if isinstance(data, dict) and (key in data or (kind == "missing" and position == len(loc) - 1)):
            data = data.get(key)
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            continue
        keys.append(key)
    return tuple(keys)


def _line(model: type[BaseModel], keys: Keys, problem: _Problem, origins: Mapping[Keys, str]) -> str:
    path = ".".join(str(key) for key in keys) or "the configuration"
    origin = next((origins[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in origins), None)
    head = f"{path} ({origin})" if origin and not problem.missing else path
    if problem.missing:
        return f"{head}: missing; it is required{_meaning(model, keys)}"
    if problem.unknown:
        return f"{head}: unknown key, value {shown(problem.value)}; {_nearest(model, keys)}"
    return f"{head}: {shown(problem.value)} is not allowed; allowed: {' or '.join(problem.allowed)}"


_TEXTS = {
    "int_parsing": "an integer", "int_type": "an integer", "int_from_float": "an integer (no fraction)",
    "float_parsing": "a number", "float_type": "a number", "finite_number": "a finite number",
    "bool_parsing": "true or false", "bool_type": "true or false",
    "string_type": "text (put it in quotes)", "list_type": "a list", "tuple_type": "a list", "set_type": "a list",
    "dict_type": "a section of 'key: value' pairs", "model_type": "a section of 'key: value' pairs",
    "model_attributes_type": "a section of 'key: value' pairs", "path_type": "a path", "none_required": "null",
    "greater_than": "more than {gt}", "greater_than_equal": "at least {ge}", "less_than": "less than {lt}",
    "less_than_equal": "at most {le}", "multiple_of": "a multiple of {multiple_of}", "literal_error": "{expected}",
    "enum": "{expected}", "too_short": "at least {min_length} items", "too_long": "at most {max_length} items",
    "string_too_short": "text of at least {min_length} characters", "value_error": "{error}",
    "string_too_long": "text of at most {max_length} characters", "assertion_error": "{error}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "union_tag_invalid": "{discriminator} of {expected_tags}",
    "union_tag_not_found": "a section with the key {discriminator}",
}  # fmt: skip


def _allowed(error: ErrorDetails) -> str:
    template = _TEXTS.get(error["type"])
    return error["msg"] if template is None else template.format_map(error.get("ctx", {}))


def _models_at(model: type[BaseModel], keys: Keys) -> list[type[BaseModel]]:
    """Return the classes that may stand at a path (several where a union does)."""
    found = [model]
    for key in keys:
        inner = [cls.model_fields[key].annotation for cls in found if isinstance(key, str) and key in cls.model_fields]
        if inner or not isinstance(key, int):
            found = [cls for annotation in inner for cls in _models_in(annotation)]
    return found


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [cls for inner in get_args(annotation) for cls in _models_in(inner)]


def _meaning(model: type[BaseModel], keys: Keys) -> str:
    for cls in _models_at(model, keys[:-1]):
        field = cls.model_fields.get(str(keys[-1]))
        if field is not None and field.description:
            return f" ({field.description})"
    return ""


def _nearest(model: type[BaseModel], keys: Keys) -> str:
    parents = _models_at(model, keys[:-1])
    known = list(dict.fromkeys(name for cls in parents for name in cls.model_fields))
    prefix, name = "".join(f"{key}." for key in keys[:-1]), str(keys[-1])
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"did you mean {prefix}{close[0]}?"
    everywhere = dict(_all_keys(model, "", ()))
    if name in everywhere:
        return f"did you mean {everywhere[name]}?"
    if close := difflib.get_close_matches(name, everywhere, n=1, cutoff=0.75):
        return f"did you mean {everywhere[close[0]]}?"
    return f"known keys here: {', '.join(known) or 'none'}"


def _all_keys(model: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        inner = [cls for cls in _models_in(field.annotation) if cls not in above]
        for cls in inner:
            yield from _all_keys(cls, f"{prefix}{name}.", (*above, model))
        yield name, f"{prefix}{name}"
