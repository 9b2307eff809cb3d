"""JSON schemas of tools: inferred from signatures, validated, and used to check and convert arguments."""

from __future__ import annotations

import copy
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, NotRequired, Required, Self, TypeAlias, Union, get_origin

import typing_extensions
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import BaseModel, Field, TypeAdapter
from pydantic import ValidationError as PydanticValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_jsonable_python
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from turnwise.errors import ToolSchemaError, shown
from turnwise.tools.signatures import Namespace, hints_of, injected_parameters, plain_hint, plain_schema, read_docstring
from turnwise.types import ToolSchema


def dialect_of(schema: Mapping[str, Any]) -> type[Validator]:
    """Return the validator class of a schema's ``$schema``, by default draft 2020-12."""
    return validator_for(schema, default=Draft202012Validator)


def validator_of(schema: Mapping[str, Any]) -> Validator:
    """Return a validator of a schema."""
    # With its own registry it fetches nothing.
    return dialect_of(schema)(schema, registry=Registry())


def dangling_reference(schema: Mapping[str, Any]) -> str | None:
    """Return a dangling reference of a valid schema, or None."""
    dialect = schema.get("$schema")
    specification = DRAFT202012 if dialect is None else specification_with(dialect, default=DRAFT202012)
    root = specification.create_resource(schema)
    waiting = [(root, Registry().resolver_with_root(root))]
    seen: set[int] = set()
    while waiting:
        resource, resolver = waiting.pop()
        contents = resource.contents
        if not isinstance(contents, Mapping) or id(contents) in seen:
            continue
        seen.add(id(contents))
        for reference in [contents[key] for key in ("$ref", "$dynamicRef") if isinstance(contents.get(key), str)]:
            try:
                target = resolver.lookup(reference)
            except Unresolvable:
                return str(reference)
            # It may lead to a place where no schema is looked for otherwise.
            waiting.append((specification.create_resource(target.contents), target.resolver))
        waiting += [(subresource, resolver.in_subresource(subresource)) for subresource in resource.subresources()]
    return None


Test: TypeAlias = Callable[[Any], bool]
"""True only for values that fit."""

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES: Final = frozenset(("title", "description", "default", "examples", "format"))
"""Keywords that restrict nothing."""


def quick_check(schema: Mapping[str, Any]) -> Test | None:
    """Compile a fast sufficient check of a plain schema, or return None if the schema is not plain.

    Plain are strings, numbers, booleans, null, enums of texts, and arrays, objects and unions of such, without limits.
    """
    return _object_test(schema) if schema.get("type") == "object" else None


def _compile(schema: Any) -> Test | None:
    if not isinstance(schema, Mapping):
        return None
    keywords, kind = set(schema) - _NOTES, schema.get("type")
    if keywords == {"anyOf"}:
        tests = [test for test in map(_compile, schema["anyOf"]) if test is not None]
        return (lambda value: any(test(value) for test in tests)) if len(tests) == len(schema["anyOf"]) else None
    if "enum" in keywords and keywords <= {"enum", "type"} and kind in (None, "string"):
        accepted = frozenset(text for text in schema["enum"] if isinstance(text, str))
        return (
            (lambda value: type(value) is str and value in accepted) if len(accepted) == len(schema["enum"]) else None
        )
    if kind == "object":
        return _object_test(schema)
    if kind == "array" and keywords <= {"type", "items"}:
        item = _compile(schema.get("items", {}))
        return None if item is None else lambda value: type(value) is list and all(map(item, value))
    if keywords == {"type"} and isinstance(kind, str) and kind in _TYPES:
        # By type: 0 and 1 are not booleans of a schema, although they equal them.
        types = _TYPES[kind]
        return lambda value: type(value) in types
    return None if keywords else lambda value: True  # noqa: ARG005 - a test


def _object_test(schema: Mapping[str, Any]) -> Test | None:
    if set(schema) - {"type", "properties", "required", "additionalProperties"} - _NOTES:
        return None
    tests = {name: _compile(value) for name, value in schema.get("properties", {}).items()}
    additional = schema.get("additionalProperties", True)
    other = None if additional is False else _compile({} if additional is True else additional)
    if None in tests.values() or (other is None and additional is not False):
        return None
    required = frozenset(schema.get("required", ()))

    def fits(value: Any) -> bool:
        if type(value) is not dict or not required <= value.keys():
            return False
        for name, member in value.items():
            test = tests.get(name, other)
            if test is None or not test(member):
                return False
        return True

    return fits


_NAME: Final = re.compile(r"[A-Za-z0-9_./-]{1,128}")
_TypedDict: Final[Any] = typing_extensions.TypedDict  # called with fields that only the run knows
_SHOWN: Final = 300
_CONTAINERS: Final = (dict, list)
# TypeError: what typing itself does not take as a hint of a value (Final, ClassVar).
_INEXPRESSIBLE: Final = (PydanticUserError, PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeError)
_EXPRESSIBLE: Final = (
    "str, int, float, bool, None, list, dict, Optional, unions, Literal, Enum, TypedDict, a dataclass or a pydantic "
    "model"
)


class ArgumentError(ValueError):
    """Arguments that do not fit a schema at a JSON path such as ``$.points[0].x``; reported to the model."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class Arguments:
    """Validates a tool's arguments against its compiled schema and converts them to Python values."""

    __slots__ = ("_adapter", "_fits", "_validator")

    def __init__(self, schema: ToolSchema, adapter: TypeAdapter[Any] | None = None, *, closed: bool = False) -> None:
        """Compile a schema; ``adapter`` converts values, ``closed`` rejects arguments that the schema does not name."""
        parameters = schema.parameters
        if closed and "additionalProperties" not in parameters:
            parameters = {**parameters, "additionalProperties": False}
        self._validator = validator_of(parameters)
        self._fits = quick_check(parameters)
        self._adapter = adapter

    def parse(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return detached keyword arguments for the function; raise ArgumentError if they do not fit."""
        try:
            if self._fits is None or not self._fits(arguments):
                errors = list(self._validator.iter_errors(arguments))
                if errors:
                    best: ValidationError = best_match(errors)
                    raise ArgumentError(_excerpt(best.message), _excerpt(best.json_path))
            values: dict[str, Any] = detached(arguments)
            if self._adapter is not None:
                values = self._adapter.validator.validate_python(values)
        except RecursionError:
            raise ArgumentError("the arguments are nested too deeply", "$") from None
        except PydanticValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise ArgumentError(_excerpt(first["msg"]), _excerpt(_path(first["loc"]))) from error
        return values


def detached(value: Any) -> Any:
    """Copy nested dicts and lists; their leaves are shared."""
    kind = type(value)
    if kind is dict:
        return {key: detached(member) if type(member) in _CONTAINERS else member for key, member in value.items()}
    return [detached(member) for member in value] if kind is list else value


def _excerpt(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def _path(location: tuple[int | str, ...]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def as_schema(
    source: ToolSchema | Mapping[str, Any] | BaseModel, *, name: str | None = None, description: str | None = None
) -> ToolSchema:
    """Return a given schema as a ToolSchema, unchanged otherwise.

    Args:
        source: A ToolSchema, ``{"type": "function", "function": {...}}`` or ``{"name", "description", "parameters"}``
            (also as a pydantic object).
        name: Replaces its name.
        description: Replaces its description.

    Raises:
        ToolSchemaError: It has no name, or its parameters are not a JSON schema of an object.
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
        body = source.get("function", source) if isinstance(source, Mapping) else source
    if not isinstance(body, Mapping):
        raise ToolSchemaError(
            f"{shown(source)} is not a tool schema: write a ToolSchema, OpenAI's form, or a dict with name, "
            "description and parameters"
        )
    label = name or body.get("name")
    if not isinstance(label, str) or not label:
        raise ToolSchemaError(f"a tool schema without a name: {source!r}; write name=... or a 'name' in the schema")
    _check_name(label)
    unknown = set(body) - {"name", "description", "parameters", "strict", "type"}
    if unknown:
        raise ToolSchemaError(
            f"tool {label!r}: a schema has name, description and parameters, not {', '.join(sorted(unknown))}"
        )
    text = body.get("description") if description is None else description
    if not isinstance(text, str | None):
        raise ToolSchemaError(f"tool {label!r}: its description is {shown(text)}: write a string")
    return ToolSchema(label, text or "", _check_parameters(label, body.get("parameters")))


def _check_parameters(label: str, body: Any) -> dict[str, Any]:
    body = body or {"type": "object", "properties": {}}
    if not isinstance(body, Mapping):
        raise ToolSchemaError(f"tool {label!r}: its parameters are {shown(body)}: write a JSON schema of type 'object'")
    parameters = copy.deepcopy(dict(body))
    if parameters.get("type") != "object":
        raise ToolSchemaError(
            f"tool {label!r}: its parameters are of type {parameters.get('type')!r}: write a JSON schema of type "
            '\'object\', such as {"type": "object", "properties": {...}}'
        )
    try:
        dialect_of(parameters).check_schema(parameters)
    except SchemaError as error:
        raise ToolSchemaError(
            f"tool {label!r}: its parameters are not a JSON schema: {error.message} at {error.json_path}"
        ) from error
    nowhere = dangling_reference(parameters)
    if nowhere is not None:
        raise ToolSchemaError(
            f"tool {label!r}: its parameters refer to {nowhere!r}, which they do not define: add it under $defs"
        )
    return parameters


def function_schema(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    namespace: Namespace | None = None,
) -> tuple[ToolSchema, Arguments]:
    """Infer a function's tool schema from hints and docstring, with the checker of its arguments.

    Args:
        fn: The function; a first parameter ``self`` is skipped.
        name: Replaces its name.
        description: Replaces its docstring's.
        namespace: Resolves names in hints that its module does not define.

    Raises:
        ToolSchemaError: A parameter has no hint, or one that JSON cannot express; the message names the remedy.
    """
    label = name or fn.__name__
    _check_name(label)
    summary, texts = read_docstring(fn)
    parameters = _parameters(fn, label)
    hints = hints_of(fn, label, namespace)
    hidden = injected_parameters(parameters, hints)
    parameters = [parameter for parameter in parameters if parameter.name not in hidden]
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
    tool_schema = ToolSchema(label, summary if description is None else description, schema)
    return tool_schema, Arguments(tool_schema, adapter, closed=True)


def arguments_of(fn: Callable[..., Any], schema: ToolSchema, *, namespace: Namespace | None = None) -> Arguments:
    """Return the argument checker of a function with a given schema; ToolSchemaError if they do not match."""
    signature = inspect.signature(fn).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature)
    stars = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = [parameter for parameter in signature if parameter.kind not in stars]
    hints = hints_of(fn, schema.name, namespace)
    hidden = injected_parameters(parameters, hints)
    parameters = [parameter for parameter in _without_self(parameters) if parameter.name not in hidden]
    names = [parameter.name for parameter in parameters]
    properties = schema.parameters.get("properties", {})
    extra = [name for name in properties if name not in names]
    if extra and not takes_any:
        raise ToolSchemaError(
            f"tool {schema.name!r}: its schema has {', '.join(map(repr, extra))}, which {fn.__qualname__} does not "
            "take: add parameters, or **arguments"
        )
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    missing = [name for name in required if name not in schema.parameters.get("required", ())]
    if missing:
        raise ToolSchemaError(
            f"tool {schema.name!r}: {fn.__qualname__} needs {', '.join(map(repr, missing))}, which the schema does not "
            "require: list it under 'required', or give the parameter a default"
        )
    fields = {parameter.name: plain_hint(hints.get(parameter.name, Any), schema.name) for parameter in parameters}
    if takes_any:
        fields |= dict.fromkeys(extra, Any)
    filled = [parameter for parameter in parameters if parameter.name in properties]
    filled += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in extra]
    adapter, _ = _adapter(schema.name, filled, {parameter.name: fields[parameter.name] for parameter in filled})
    return Arguments(schema, adapter, closed=True)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ToolSchemaError(
            f"{name!r} is not a name for a tool: use letters, digits and _ . / - (at most 128); write "
            '@function_tool("name")'
        )


def injected_of(fn: Callable[..., Any], *, namespace: Namespace | None = None) -> dict[str, bool]:
    """Return the parameters of a function that the task fills, and whether each is required."""
    return injected_parameters(list(inspect.signature(fn).parameters.values()), hints_of(fn, fn.__name__, namespace))


def _without_self(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return parameters[1:] if parameters and parameters[0].name == "self" else parameters


def _parameters(fn: Callable[..., Any], label: str) -> list[inspect.Parameter]:
    parameters = _without_self(list(inspect.signature(fn).parameters.values()))
    if parameters and parameters[0].name == "cls" and parameters[0].annotation is inspect.Parameter.empty:
        raise ToolSchemaError(f"tool {label!r}: a class method cannot be a tool: write a method or a static one")
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            annotation = "list[str]" if parameter.kind is parameter.VAR_POSITIONAL else "dict[str, str]"
            raise ToolSchemaError(
                f"tool {label!r}: {parameter} cannot be described to a model: name the parameters, take one of type "
                f"{annotation}, or give the schema with @function_tool(schema={{...}})"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolSchemaError(
                f"tool {label!r}: calls pass {parameter.name!r} by name: remove the '/' from the signature"
            )
    return parameters


def _annotation(label: str, parameter: inspect.Parameter, hints: Mapping[str, Any], text: str | None) -> Any:
    if parameter.name not in hints:
        raise ToolSchemaError(
            f"tool {label!r}: parameter {parameter.name!r} has no type hint: write {parameter.name}: str, or another "
            f"type that JSON can express ({_EXPRESSIBLE})"
        )
    annotation = plain_hint(hints[parameter.name], label)
    if parameter.default is None and annotation is not Any:
        annotation = Union[annotation, None]  # noqa: UP007 - the operand may be a form that | does not take
    if text and not _has_description(annotation):
        annotation = typing.Annotated[annotation, Field(description=text)]
    return annotation


def _has_description(annotation: Any) -> bool:
    metadata = annotation.__metadata__ if get_origin(annotation) is typing.Annotated else ()
    return any(isinstance(note, FieldInfo) and note.description for note in metadata)


def _adapter(
    label: str, parameters: list[inspect.Parameter], fields: dict[str, Any]
) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    try:
        keys = {key: Required[hint] if key in required else NotRequired[hint] for key, hint in fields.items()}
        adapter: TypeAdapter[Any] = TypeAdapter(_TypedDict("Arguments", keys))
        return adapter, plain_schema(adapter.json_schema())
    except _INEXPRESSIBLE as error:
        culprit = next((key for key, hint in fields.items() if not _expressible(hint)), None)
        hint = fields.get(culprit or "")
        what = hint.__name__ if isinstance(hint, type) else str(hint)
        part = f"parameter {culprit!r}: {what}" if culprit is not None else "its signature"
        raise ToolSchemaError(
            f"tool {label!r}: {part} cannot be described to a model ({str(error).splitlines()[0]}): use {_EXPRESSIBLE}"
        ) from error


def _expressible(hint: Any) -> bool:
    try:
        TypeAdapter(_TypedDict("Arguments", {"value": Required[hint]})).json_schema()
    except _INEXPRESSIBLE:
        return False
    return True


def _default(label: str, parameter: inspect.Parameter) -> Any:
    try:
        return to_jsonable_python(parameter.default)
    except PydanticSerializationError as error:
        raise ToolSchemaError(
            f"tool {label!r}: the default of {parameter.name!r} is {parameter.default!r}, which JSON cannot express: "
            "use None and set it inside the function"
        ) from error


class _Open(dict[str, Any]):
    """A dict whose keys are also attributes, at any depth."""

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for methods by name: those are not keys.
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self:
            if name in ("description", "enum", "required", "strict"):
                return None
            raise AttributeError(f"{type(self).__name__} has no {name!r}: it has {', '.join(self) or 'nothing'}")
        value = self[name]
        if type(value) is dict:
            # Written back, so that changes of the part are in the whole.
            value = self[name] = _PARTS.get(name, _Open)(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @classmethod
    def model_validate(cls, value: Mapping[str, Any]) -> Self:
        return cls(copy.deepcopy(dict(value)))

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        plain: dict[str, Any] = _plain(self, exclude_none)
        return plain


class OpenAIFunctionPropertySchema(_Open):
    """Schema of one parameter: ``type``, ``description``, ``enum`` and any JSON schema keyword."""


class OpenAIFunctionParametersSchema(_Open):
    """Schema of the parameters: ``type``, ``properties``, ``required`` and any JSON schema keyword."""


class OpenAIFunctionSchema(_Open):
    """A function: ``name``, ``description``, ``parameters``."""


class OpenAIFunctionToolSchema(_Open):
    """A tool: ``type`` (``function``) and ``function``."""

    @classmethod
    def of(cls, schema: ToolSchema) -> Self:
        """Convert a ToolSchema to this form."""
        return cls.model_validate(schema.to_json())


_PARTS: dict[str, type[_Open]] = {"function": OpenAIFunctionSchema, "parameters": OpenAIFunctionParametersSchema}


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, exclude_none) for key, item in value.items() if not (exclude_none and item is None)}
    return [_plain(item, exclude_none) for item in value] if isinstance(value, list) else copy.copy(value)
