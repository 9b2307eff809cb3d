"""Reward functions that compare texts: exact match, regular expressions, JSON against a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from turnwise.envs.rewards.answers import check_normalization, extractor, gold_answers, normalize
from turnwise.envs.rewards.core import RewardFunction
from turnwise.errors import ConfigError, EnvError, shown

_FENCED = re.compile(r"```(?:[ \t]*(?:json|JSON))?[ \t]*\n(.*?)```", re.DOTALL)
_MOST_STARTS = 1000  # of objects and arrays that are tried in one text


class ExactMatch(RewardFunction):
    """1 where the answer equals the right one (or one of several), else 0."""

    inline: ClassVar[bool] = True

    def __init__(self, *, column: str = "answer", extract: str = "text", normalize: str = "space") -> None:
        """Say what is compared.

        Args:
            column: Entry of ``task.data`` with the right answer, or a list of answers that are all right.
            extract: Where the model's answer stands; see :func:`~turnwise.envs.rewards.answers.extractor`.
            normalize: ``none``, ``space``, ``case`` or ``words``; both sides are brought into that form.

        Raises:
            ConfigError: A setting is none of these.
        """
        self._column = column
        self._extract = extractor(extract, "exact_match")
        self._how = check_normalization(normalize, "exact_match")

    def __call__(self, text: str, data: Mapping[str, Any]) -> float:
        """Compare."""
        gold = gold_answers(data, self._column, "exact_match")
        answer = self._extract(text)
        if answer is None:
            return 0.0
        answer = normalize(answer, self._how)
        return float(any(answer == normalize(str(each).strip(), self._how) for each in gold))


class Regex(RewardFunction):
    """1 where a pattern is found in the text, else 0. For formats, and as a gate before dearer functions.

    The pattern runs on the event loop: one that backtracks without bound stops everything.
    """

    inline: ClassVar[bool] = True

    def __init__(self, pattern: str, *, whole: bool = False, ignore_case: bool = False) -> None:
        """Compile a pattern.

        Args:
            pattern: In the syntax of Python's ``re``; ``.`` matches line breaks, too.
            whole: Whether all of the text (without white space around it) must match.
            ignore_case: Whether case does not matter.

        Raises:
            ConfigError: The pattern is none.
        """
        try:
            self._pattern = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
        except (re.error, TypeError) as error:
            raise ConfigError(f"regex: pattern is {shown(pattern)}, which is no regex: {error}") from error
        self._whole = whole

    def __call__(self, text: str) -> float:
        """Search, or match as a whole."""
        if self._whole:
            return float(self._pattern.fullmatch(text.strip()) is not None)
        return float(self._pattern.search(text) is not None)


class JSONSchema(RewardFunction):
    """1 where the answer holds JSON that satisfies a schema, else 0, or part of it."""

    inline: ClassVar[bool] = True

    def __init__(
        self, schema: Mapping[str, Any] | None = None, *, column: str = "schema", partial: bool = False
    ) -> None:
        """Take a schema.

        Args:
            schema: A JSON schema (draft 2020-12). None takes each task's own.
            column: Entry of ``task.data`` with the task's schema.
            partial: Whether an object that does not satisfy it earns half of the share of the schema's ``properties``
                that it has and that satisfy theirs.

        Raises:
            ConfigError: The schema is none.
        """
        self._column = column
        self._partial = partial
        try:
            self._validator = None if schema is None else _validator(schema)
        except SchemaError as error:
            raise ConfigError(f"json_schema: schema is no JSON schema: {error.message}") from error

    def __call__(self, text: str, data: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Find the JSON and hold it to the schema. The metric ``valid_json`` says whether there was any."""
        validator = self._validator or self._own(data)
        found, value = find_json(text)
        if not found:
            return 0.0, {"valid_json": 0.0}
        try:
            if validator.is_valid(value):
                return 1.0, {"valid_json": 1.0}
            return (self._share(validator, value) if self._partial else 0.0), {"valid_json": 1.0}
        except Unresolvable as error:
            raise EnvError(f"json_schema: the schema refers to {error.ref!r}, which stands nowhere in it") from error
        except RecursionError:
            # A schema may describe endless nesting; a value that is nested beyond the stack satisfies nothing.
            return 0.0, {"valid_json": 1.0}

    def _own(self, data: Mapping[str, Any]) -> Draft202012Validator:
        schema = data.get(self._column)
        if not isinstance(schema, Mapping):
            raise EnvError(
                f"json_schema: task.data[{self._column!r}] is {shown(schema)}: it must be a JSON schema, or give one "
                "for all tasks as schema"
            )
        try:
            return _validator(schema)
        except SchemaError as error:
            raise EnvError(f"json_schema: task.data[{self._column!r}] is no JSON schema: {error.message}") from error

    @staticmethod
    def _share(validator: Draft202012Validator, value: Any) -> float:
        properties = validator.schema.get("properties") if isinstance(validator.schema, Mapping) else None
        if not isinstance(properties, Mapping) or not properties or not isinstance(value, Mapping):
            return 0.0
        # Evolved, the schemas of properties keep the definitions that they refer to.
        held = sum(
            name in value and validator.evolve(schema=inner).is_valid(value[name]) for name, inner in properties.items()
        )
        return 0.5 * held / len(properties)


def _validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    # An empty registry: a schema must never make this process fetch something.
    return Draft202012Validator(schema, registry=Registry())


def find_json(text: str) -> tuple[bool, Any]:
    """Return whether a text holds JSON, and the value: the whole text, else the last fenced block, else the last
    object or array that stands in it.
    """
    for candidate in (text.strip(), *reversed(_FENCED.findall(text))):
        try:
            return True, orjson.loads(candidate)
        except orjson.JSONDecodeError:
            continue
    return _last_value(text)


def _last_value(text: str) -> tuple[bool, Any]:
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    position, found, value = 0, False, None
    for _ in range(_MOST_STARTS):
        starts = [place for place in (text.find("{", position), text.find("[", position)) if place >= 0]
        if not starts:
            break
        try:
            value, position = decoder.raw_decode(text, min(starts))
            found = True
        except (ValueError, RecursionError):
            position = min(starts) + 1
    return found, value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
