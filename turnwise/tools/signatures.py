"""Signatures of tools: type hints as pydantic takes them, injected parameters, docstrings, plain schemas."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, Final, NotRequired, Required, TypeAlias, TypeVar, Union, get_args, get_origin

import typing_extensions
from pydantic import AfterValidator, Field
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import PydanticSerializationError, to_jsonable_python

from turnwise.errors import ToolSchemaError

Namespace: TypeAlias = Callable[[], Mapping[str, Any]]
"""Finds the names around a definition; asked only where a hint is not found in its module."""

_TypedDict: Final[Any] = typing_extensions.TypedDict  # called with fields that only the run knows


def hints_of(fn: Callable[..., Any], label: str, namespace: Namespace | None) -> dict[str, Any]:
    """Return a function's resolved type hints; ToolSchemaError if one is undefined or not a type."""
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except NameError as error:
        around = namespace() if namespace is not None else {}
        try:
            return typing.get_type_hints(fn, localns=dict(around), include_extras=True)
        except NameError:
            raise ToolSchemaError(
                f"tool {label!r}: {error} in a type hint: define or import it at the top of {fn.__module__}"
            ) from error
    except TypeError as error:
        raise ToolSchemaError(f"tool {label!r}: a type hint is not a type: {error}") from error


def plain_hint(annotation: Any, label: str, above: tuple[Any, ...] = ()) -> Any:
    """Return a hint as pydantic takes it: texts in Annotated become descriptions, TypedDicts the supported kind.

    ``above`` are the enclosing TypedDicts and dataclasses; ToolSchemaError for a recursive TypedDict.
    """
    if typing_extensions.is_typeddict(annotation):
        return _typed_dict(annotation, label, above)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass(annotation, label, above)
    if annotation is complex:
        raise ToolSchemaError(f"tool {label!r}: complex is no type of JSON: take two floats, or a str")
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        inner = plain_hint(arguments[0], label, above)
        metadata = [Field(description=part) if isinstance(part, str) else part for part in arguments[1:]]
        if inner is arguments[0] and all(new is old for new, old in zip(metadata, arguments[1:], strict=True)):
            return annotation
        return reduce(lambda hint, part: typing.Annotated[hint, part], metadata, inner)
    if origin is None or origin is typing.Literal or not arguments:
        return annotation
    if origin in (Required, NotRequired):
        return plain_hint(arguments[0], label, above)
    converted = tuple(plain_hint(part, label, above) for part in arguments)
    if all(new is old for new, old in zip(converted, arguments, strict=True)):
        return annotation
    if origin in (Union, types.UnionType):
        return Union[converted]  # noqa: UP007 - from a tuple
    return origin[converted]


def _typed_dict(annotation: Any, label: str, above: tuple[Any, ...]) -> Any:
    if annotation in above:
        raise ToolSchemaError(
            f"tool {label!r}: the TypedDict {annotation.__name__} contains itself: use a pydantic model or a dataclass"
        )
    hints = typing_extensions.get_type_hints(annotation, include_extras=True)
    fields: dict[str, Any] = {}
    for key, hint in hints.items():
        plain = plain_hint(hint, label, (*above, annotation))
        fields[key] = Required[plain] if _is_required(hint, key in annotation.__required_keys__) else NotRequired[plain]
    return _copy_docs(_TypedDict(annotation.__name__, fields), annotation)


def _is_required(hint: Any, default: bool) -> bool:
    """Whether a key must be given; ``__required_keys__`` does not see qualifiers where annotations are strings."""
    origin = get_origin(hint)
    if origin in (Required, NotRequired):
        return origin is Required
    wraps = origin in (typing.Annotated, typing_extensions.ReadOnly)
    return _is_required(get_args(hint)[0], default) if wraps else default


def _dataclass(annotation: Any, label: str, above: tuple[Any, ...]) -> Any:
    """Return a dataclass unchanged, or as a converted TypedDict if a nested hint must be rewritten."""
    if annotation in above or is_pydantic_dataclass(annotation):
        return annotation
    try:
        hints = typing_extensions.get_type_hints(annotation, include_extras=True)
    except NameError:
        return annotation  # pydantic may resolve the names, or names the missing one
    init_fields = [item for item in dataclasses.fields(annotation) if item.init]
    inner = {item.name: plain_hint(hints[item.name], label, (*above, annotation)) for item in init_fields}
    if all(inner[item.name] is hints[item.name] for item in init_fields):
        return annotation
    fields: dict[str, Any] = {}
    for item in init_fields:
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            fields[item.name] = Required[inner[item.name]]
        else:
            fields[item.name] = NotRequired[_with_default(inner[item.name], item.default)]
    typed_dict = _copy_docs(_TypedDict(annotation.__name__, fields), annotation)
    return typing.Annotated[typed_dict, AfterValidator(lambda values: annotation(**values))]


def _with_default(hint: Any, default: Any) -> Any:
    if default is dataclasses.MISSING:
        return hint
    try:
        return typing.Annotated[hint, Field(json_schema_extra={"default": to_jsonable_python(default)})]
    except PydanticSerializationError:
        return hint


def _copy_docs(typed_dict: Any, annotation: Any) -> Any:
    text = annotation.__doc__ or ""
    # What the decorator of dataclasses writes by itself describes nothing.
    generated = text.startswith(f"{annotation.__name__}(") and dataclasses.is_dataclass(annotation)
    typed_dict.__module__, typed_dict.__doc__ = annotation.__module__, None if generated else text or None
    return typed_dict


T = TypeVar("T")


class _Injected:
    def __repr__(self) -> str:
        return "injected"


_MARK: Final = _Injected()

Injected = Annotated[T, _MARK]
"""A parameter that is not part of a tool's schema: ``table: Injected[str]``. Its value comes from
``tools_kwargs[tool]["execute_kwargs"]`` of the episode's task, unchanged."""


def injected_parameters(parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> dict[str, bool]:
    """Return the names of injected parameters, and whether each is required."""
    return {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if _is_injected(hints.get(parameter.name))
    }


def _is_injected(hint: Any) -> bool:
    return get_origin(hint) is Annotated and any(mark is _MARK for mark in get_args(hint)[1:])


_SECTION: Final = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|References|"
    r"Todo|Warnings?):\s*"
)
_ENTRY: Final = re.compile(r"(?P<name>\w+)\s*(\([^)]*\))?\s*:\s*(?P<text>.*)")


def read_docstring(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of a docstring and the texts of its ``Args`` section."""
    lines = inspect.cleandoc(fn.__doc__ or "").splitlines()
    start = next((n for n, line in enumerate(lines) if _SECTION.fullmatch(line)), len(lines))
    texts: dict[str, str] = {}
    section, indent, current = "", None, None
    for line in lines[start:]:
        header = _SECTION.fullmatch(line)
        if header:
            section, indent, current = header[1], None, None
            continue
        if section not in ("Args", "Arguments", "Parameters", "Params") or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        entry = _ENTRY.fullmatch(line.strip())
        if depth == indent and entry:
            current = entry["name"]
            texts[current] = entry["text"].strip()
        elif current is not None:
            texts[current] = f"{texts[current]} {line.strip()}".strip()
    return "\n".join(lines[:start]).strip(), texts


# Where a JSON schema holds further ones; everything else in it is a value.
_ONE: Final = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_MANY: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas")


def plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without titles and with definitions inlined; recursive ones stay under ``$defs``."""
    inliner = _Inliner(schema.get("$defs", {}), {})
    plain: dict[str, Any] = inliner.plain({key: value for key, value in schema.items() if key != "$defs"}, ())
    if inliner.recursive:
        plain["$defs"] = inliner.recursive
    return plain


@dataclass(slots=True)
class _Inliner:
    definitions: dict[str, Any]
    recursive: dict[str, Any]

    def plain(self, schema: Any, above: tuple[str, ...]) -> Any:
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return self._inline_reference(schema, above)
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ("title", "discriminator"):
                continue
            if key in _ONE:
                value = self.plain(value, above)
            elif key in _MANY:
                value = [self.plain(subschema, above) for subschema in value]
            elif key in _NAMED:
                value = {name: self.plain(subschema, above) for name, subschema in value.items()}
            result[key] = value
        return result

    def _inline_reference(self, schema: dict[str, Any], above: tuple[str, ...]) -> dict[str, Any]:
        name = schema["$ref"].removeprefix("#/$defs/")
        siblings = {key: value for key, value in schema.items() if key not in ("$ref", "title")}
        if name in above:
            self.recursive.setdefault(name, {})
        elif name not in self.recursive:
            definition: dict[str, Any] = self.plain(self.definitions[name], (*above, name))
            if name not in self.recursive:
                return {**definition, **siblings}
            self.recursive[name] = definition
        return {"$ref": schema["$ref"], **siblings}
