"""From a signature to a JSON schema, and from a model's arguments to Python values.

Owns: what a function's type hints and docstring say to a model (:func:`function_schema`), what may be given instead
(:func:`as_schema`), and :class:`Arguments`, which holds calls against the whole schema. Refuses: losing any part of a
schema, and offering what JSON cannot express.
"""

from __future__ import annotations

import copy
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final, NotRequired, Required, TypeAlias, Union, get_args, get_origin

import typing_extensions
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from pydantic import BaseModel, Field, TypeAdapter
from pydantic import ValidationError as PydanticValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_jsonable_python

from turnwise.errors import ToolSchemaError
from turnwise.tools.inline import plain_schema
from turnwise.tools.plain import quick_check
from turnwise.types import ToolSchema

Namespace: TypeAlias = Callable[[], Mapping[str, Any]]
"""Finds the names around a definition; asked only where a hint is not found in its module."""

_NAME: Final = re.compile(r"[A-Za-z0-9_./-]{1,128}")
_SECTION: Final = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|References|"
    r"Todo|Warnings?):\s*"
)
_ENTRY: Final = re.compile(r"(?P<name>\w+)\s*(\([^)]*\))?\s*:\s*(?P<text>.*)")
_TypedDict: Final[Any] = typing_extensions.TypedDict  # called with fields that only the run knows
_SHOWN: Final = 300
_EXPRESSIBLE: Final = (
    "str, int, float, bool, None, list, dict, Optional, unions, Literal, Enum, TypedDict, a dataclass or a pydantic "
    "model"
)


class ArgumentError(ValueError):
    """Arguments that do not fit a schema. Answered to the model, never raised to a user.

    Attributes:
        path: Where, such as ``$.points[0].x``.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class Arguments:
    """Holds the arguments of calls against a schema, compiled once, and makes Python values of them."""

    __slots__ = ("_adapter", "_fits", "_validator")

    def __init__(self, schema: ToolSchema, adapter: TypeAdapter[Any] | None = None, *, closed: bool = False) -> None:
        """Compile.

        Args:
            schema: What the model was told.
            adapter: Converts valid arguments to the annotated types; None leaves them as they are.
            closed: Refuse arguments that the schema does not name, also where it does not say so.
        """
        parameters = schema.parameters
        if closed and "additionalProperties" not in parameters:
            parameters = {**parameters, "additionalProperties": False}
        self._validator = Draft202012Validator(parameters)
        self._fits = quick_check(parameters)
        self._adapter = adapter

    def parse(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the function is to be called with.

        Raises:
            ArgumentError: They do not fit.
        """
        try:
            if self._fits is None or not self._fits(arguments):
                errors = list(self._validator.iter_errors(arguments))
                if errors:
                    raise _argument_error(errors)
            if self._adapter is None:
                return dict(arguments)
            values: dict[str, Any] = self._adapter.validator.validate_python(arguments)
        except RecursionError:
            raise ArgumentError("the arguments are nested too deeply", "$") from None
        except PydanticValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise ArgumentError(first["msg"], _path(first["loc"])) from error
        return values


def _argument_error(errors: list[ValidationError]) -> ArgumentError:
    best: ValidationError = best_match(errors)
    message = best.message
    if len(message) > _SHOWN:
        message = f"{message[: _SHOWN // 2]} ... {message[-_SHOWN // 2 :]}"
    return ArgumentError(message, best.json_path)


def _path(location: tuple[int | str, ...]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def as_schema(
    source: ToolSchema | Mapping[str, Any] | BaseModel, *, name: str | None = None, description: str | None = None
) -> ToolSchema:
    """Return a given schema as a ToolSchema, with nothing of it lost.

    Args:
        source: A ToolSchema, ``{"type": "function", "function": {...}}`` or ``{"name", "description", "parameters"}``
            (also as a pydantic object).
        name: Instead of its name.
        description: Instead of its description.

    Raises:
        ToolSchemaError: It has no name, or its parameters are no JSON schema of an object.
    """
    if isinstance(source, BaseModel):
        # OpenAI's form as a pydantic object, as other libraries hold it.
        source = source.model_dump(exclude_unset=True)
    if isinstance(source, ToolSchema):
        body: Mapping[str, Any] = {
            "name": source.name,
            "description": source.description,
            "parameters": source.parameters,
        }
    else:
        body = source.get("function", source)
    label = name or body.get("name")
    if not isinstance(label, str) or not label:
        raise ToolSchemaError(f"a tool schema without a name: {source!r}; write name=... or a 'name' in the schema")
    _check_name(label)
    unknown = set(body) - {"name", "description", "parameters", "strict", "type"}
    if unknown:
        raise ToolSchemaError(
            f"tool {label!r}: a schema has name, description and parameters, not {', '.join(sorted(unknown))}"
        )
    parameters = copy.deepcopy(dict(body.get("parameters") or {"type": "object", "properties": {}}))
    if parameters.get("type") != "object":
        raise ToolSchemaError(
            f"tool {label!r}: its parameters are of type {parameters.get('type')!r}: write a JSON schema of type "
            '\'object\', such as {"type": "object", "properties": {...}}'
        )
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ToolSchemaError(
            f"tool {label!r}: its parameters are no JSON schema: {error.message} at {error.json_path}"
        ) from error
    text = body.get("description") if description is None else description
    return ToolSchema(label, text or "", parameters)


def function_schema(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    namespace: Namespace | None = None,
) -> tuple[ToolSchema, Arguments]:
    """Return what a function's hints and docstring say to a model, and what checks its calls.

    Args:
        fn: The function. A first parameter ``self`` is not part of the schema.
        name: Instead of its own name.
        description: Instead of its docstring.
        namespace: Finds names of hints that its module does not hold.

    Raises:
        ToolSchemaError: A parameter has no hint, or one that JSON cannot express; the message says what to write.
    """
    label = name or fn.__name__
    _check_name(label)
    summary, texts = _docstring(fn)
    parameters = _parameters(fn, label)
    hints = _hints(fn, label, namespace)
    fields: dict[str, Any] = {}
    for parameter in parameters:
        fields[parameter.name] = _annotation(label, parameter, hints, texts.get(parameter.name))
    adapter, plain = _adapter(label, parameters, fields)
    properties = plain.get("properties", {})
    for parameter in parameters:
        if parameter.default is not parameter.empty:
            properties[parameter.name]["default"] = _default(label, parameter)
    schema = {"type": "object", "properties": properties}
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if required:
        schema["required"] = required
    if "$defs" in plain:
        schema["$defs"] = plain["$defs"]
    found = ToolSchema(label, summary if description is None else description, schema)
    return found, Arguments(found, adapter, closed=True)


def arguments_of(fn: Callable[..., Any], schema: ToolSchema, *, namespace: Namespace | None = None) -> Arguments:
    """Return what checks the calls of a function whose schema was given.

    Values are converted to the function's hints where it has them.

    Raises:
        ToolSchemaError: The schema and the signature do not fit together.
    """
    signature = inspect.signature(fn).parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature)
    parameters = [each for each in signature if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    parameters = _without_self(parameters)
    names = [each.name for each in parameters]
    properties = schema.parameters.get("properties", {})
    extra = [name for name in properties if name not in names]
    if extra and not takes_any:
        raise ToolSchemaError(
            f"tool {schema.name!r}: its schema has {', '.join(map(repr, extra))}, which {fn.__qualname__} does not "
            "take: add parameters, or **arguments"
        )
    needed = [each.name for each in parameters if each.default is each.empty]
    missing = [name for name in needed if name not in schema.parameters.get("required", ())]
    if missing:
        raise ToolSchemaError(
            f"tool {schema.name!r}: {fn.__qualname__} needs {', '.join(map(repr, missing))}, which the schema does not "
            "require: list it under 'required', or give the parameter a default"
        )
    hints = _hints(fn, schema.name, namespace)
    fields = {each.name: _plain_types(hints.get(each.name, Any), schema.name) for each in parameters}
    if takes_any:
        fields |= dict.fromkeys(extra, Any)
    kept = [each for each in parameters if each.name in properties]
    kept += [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None) for each in extra]
    adapter, _ = _adapter(schema.name, kept, {each.name: fields[each.name] for each in kept})
    return Arguments(schema, adapter, closed=True)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ToolSchemaError(
            f"{name!r} is no name for a tool: use letters, digits and _ . / - (at most 128); write "
            '@function_tool("name")'
        )


def _without_self(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return parameters[1:] if parameters and parameters[0].name == "self" else parameters


def _parameters(fn: Callable[..., Any], label: str) -> list[inspect.Parameter]:
    parameters = _without_self(list(inspect.signature(fn).parameters.values()))
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolSchemaError(
                f"tool {label!r}: a model cannot be told of {parameter}: name the parameters, take one of type "
                "dict[str, str], or give the schema with @function_tool(schema={...})"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolSchemaError(
                f"tool {label!r}: calls pass {parameter.name!r} by name: remove the '/' from the signature"
            )
    return parameters


def _hints(fn: Callable[..., Any], label: str, namespace: Namespace | None) -> dict[str, Any]:
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


def _annotation(label: str, parameter: inspect.Parameter, hints: Mapping[str, Any], text: str | None) -> Any:
    if parameter.name not in hints:
        raise ToolSchemaError(
            f"tool {label!r}: parameter {parameter.name!r} has no type hint: write {parameter.name}: str, or another "
            f"type that JSON can express ({_EXPRESSIBLE})"
        )
    annotation = _plain_types(hints[parameter.name], label)
    if parameter.default is None and annotation is not Any:
        annotation = Union[annotation, None]  # noqa: UP007 - the operand may be a form that | does not take
    if text and not _described(annotation):
        annotation = typing.Annotated[annotation, Field(description=text)]
    return annotation


def _described(annotation: Any) -> bool:
    metadata = annotation.__metadata__ if get_origin(annotation) is typing.Annotated else ()
    return any(isinstance(each, FieldInfo) and each.description for each in metadata)


def _plain_types(annotation: Any, label: str, above: tuple[Any, ...] = ()) -> Any:
    """Return a hint as pydantic takes it: texts in Annotated become descriptions, TypedDicts the kind it knows."""
    if typing_extensions.is_typeddict(annotation):
        return _typed_dict(annotation, label, above)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        inner = _plain_types(arguments[0], label, above)
        metadata = [Field(description=each) if isinstance(each, str) else each for each in arguments[1:]]
        return reduce(lambda hint, each: typing.Annotated[hint, each], metadata, inner)
    if origin is None or origin is typing.Literal or not arguments:
        return annotation
    if origin in (Required, NotRequired):
        return _plain_types(arguments[0], label, above)
    converted = tuple(_plain_types(each, label, above) for each in arguments)
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
        inner = _plain_types(hint, label, (*above, annotation))
        fields[key] = Required[inner] if key in annotation.__required_keys__ else NotRequired[inner]
    found = _TypedDict(annotation.__name__, fields)
    found.__module__, found.__doc__ = annotation.__module__, annotation.__doc__
    return found


def _adapter(
    label: str, parameters: list[inspect.Parameter], fields: dict[str, Any]
) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    required = {each.name for each in parameters if each.default is each.empty}
    keys = {key: Required[hint] if key in required else NotRequired[hint] for key, hint in fields.items()}
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(_TypedDict("Arguments", keys))
        return adapter, plain_schema(adapter.json_schema())
    except (PydanticUserError, PydanticSchemaGenerationError, PydanticUndefinedAnnotation) as error:
        culprit = next((key for key, hint in fields.items() if not _expressible(hint)), None)
        named = f"parameter {culprit!r}: {_type_name(fields[culprit])}" if culprit is not None else "its signature"
        raise ToolSchemaError(
            f"tool {label!r}: {named} cannot be told to a model ({str(error).splitlines()[0]}): use {_EXPRESSIBLE}"
        ) from error


def _expressible(hint: Any) -> bool:
    try:
        TypeAdapter(hint).json_schema()
    except (PydanticUserError, PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
        return False
    return True


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _default(label: str, parameter: inspect.Parameter) -> Any:
    try:
        return to_jsonable_python(parameter.default)
    except PydanticSerializationError as error:
        raise ToolSchemaError(
            f"tool {label!r}: the default of {parameter.name!r} is {parameter.default!r}, which JSON cannot express: "
            "use None and put it in place inside the function"
        ) from error


def _docstring(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of a docstring, and the texts of its ``Args`` section where there is one."""
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
