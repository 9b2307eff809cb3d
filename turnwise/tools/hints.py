"""Type hints as pydantic takes them.

Owns: :func:`hints_of`, which reads the hints of a function, and :func:`plain_hint`, which rewrites what pydantic would
refuse or pass over: ``typing.TypedDict`` on Python 3.11, and texts in ``Annotated``, at any depth of hints, TypedDicts
and dataclasses. Refuses: making schemas (``schema.py``).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final, NotRequired, Required, TypeAlias, Union, get_args, get_origin

import typing_extensions
from pydantic import AfterValidator, Field
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import PydanticSerializationError, to_jsonable_python

from turnwise.errors import ToolSchemaError

Namespace: TypeAlias = Callable[[], Mapping[str, Any]]
"""Finds the names around a definition; asked only where a hint is not found in its module."""

_TypedDict: Final[Any] = typing_extensions.TypedDict  # called with fields that only the run knows


def hints_of(fn: Callable[..., Any], label: str, namespace: Namespace | None) -> dict[str, Any]:
    """Return the hints of a function, those written as text too.

    Raises:
        ToolSchemaError: A hint names what is not there, or is no type.
    """
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
        raise ToolSchemaError(f"tool {label!r}: a type hint is no type: {error}") from error


def plain_hint(annotation: Any, label: str, above: tuple[Any, ...] = ()) -> Any:
    """Return a hint as pydantic takes it: texts in Annotated become descriptions, TypedDicts the kind it knows.

    Args:
        annotation: The hint.
        label: Names the tool in errors.
        above: The TypedDicts and dataclasses that it stands in.

    Raises:
        ToolSchemaError: A TypedDict holds itself.
    """
    if typing_extensions.is_typeddict(annotation):
        return _typed_dict(annotation, label, above)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass(annotation, label, above)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        inner = plain_hint(arguments[0], label, above)
        metadata = [Field(description=each) if isinstance(each, str) else each for each in arguments[1:]]
        if inner is arguments[0] and all(new is old for new, old in zip(metadata, arguments[1:], strict=True)):
            return annotation
        return reduce(lambda hint, each: typing.Annotated[hint, each], metadata, inner)
    if origin is None or origin is typing.Literal or not arguments:
        return annotation
    if origin in (Required, NotRequired):
        return plain_hint(arguments[0], label, above)
    converted = tuple(plain_hint(each, label, above) for each in arguments)
    if all(new is old for new, old in zip(converted, arguments, strict=True)):
        return annotation
    if origin in (Union, types.UnionType):
        return Union[converted]  # noqa: UP007 - from a tuple
    return origin[converted]


def _typed_dict(annotation: Any, label: str, above: tuple[Any, ...]) -> Any:
    if annotation in above:
        raise ToolSchemaError(
            f"tool {label!r}: the TypedDict {annotation.__name__} holds itself: write a pydantic model or a dataclass"
        )
    hints = typing_extensions.get_type_hints(annotation, include_extras=True)
    fields: dict[str, Any] = {}
    for key, hint in hints.items():
        inner = plain_hint(hint, label, (*above, annotation))
        fields[key] = Required[inner] if key in annotation.__required_keys__ else NotRequired[inner]
    return _named(_TypedDict(annotation.__name__, fields), annotation)


def _dataclass(annotation: Any, label: str, above: tuple[Any, ...]) -> Any:
    """Return a dataclass as it is, or, where a hint inside must be rewritten, a TypedDict that becomes it."""
    if annotation in above or is_pydantic_dataclass(annotation):
        return annotation
    try:
        hints = typing_extensions.get_type_hints(annotation, include_extras=True)
    except NameError:
        return annotation  # pydantic may know the names, or says which one is missing
    given = [each for each in dataclasses.fields(annotation) if each.init]
    inner = {each.name: plain_hint(hints[each.name], label, (*above, annotation)) for each in given}
    if all(inner[each.name] is hints[each.name] for each in given):
        return annotation
    fields: dict[str, Any] = {}
    for each in given:
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            fields[each.name] = Required[inner[each.name]]
        else:
            fields[each.name] = NotRequired[_with_default(inner[each.name], each.default)]
    found = _named(_TypedDict(annotation.__name__, fields), annotation)
    return typing.Annotated[found, AfterValidator(lambda values: annotation(**values))]


def _with_default(hint: Any, default: Any) -> Any:
    if default is dataclasses.MISSING:
        return hint
    try:
        return typing.Annotated[hint, Field(json_schema_extra={"default": to_jsonable_python(default)})]
    except PydanticSerializationError:
        return hint


def _named(made: Any, annotation: Any) -> Any:
    text = annotation.__doc__ or ""
    # What the decorator of dataclasses writes by itself describes nothing.
    generated = text.startswith(f"{annotation.__name__}(") and dataclasses.is_dataclass(annotation)
    made.__module__, made.__doc__ = annotation.__module__, None if generated else text or None
    return made
