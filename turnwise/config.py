"""Configuration: YAML files and ``key=value`` overrides to a checked pydantic model, and back."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from turnwise.errors import ConfigError, shown
from turnwise.plugins import load_extensions

Keys: TypeAlias = "tuple[str | int, ...]"
"""The path of one value in a configuration: keys of sections and indices of lists."""


class Section(BaseModel):
    """A section of a configuration, which refuses unknown keys."""

    model_config = ConfigDict(extra="forbid")
    # Keys by their names in other frameworks, for the error of an unknown one.
    foreign_keys: ClassVar[Mapping[str, str]] = {}


@dataclass(slots=True)
class _Problem:
    """A problem at one path; the alternatives of a union are one problem."""

    value: Any
    unknown: bool
    missing: bool
    allowed: list[str]


def report_problems(
    model: type[BaseModel], data: Any, origins: Mapping[Keys, str], errors: Sequence[ErrorDetails]
) -> str:
    """Return one line per wrong value, with its source from ``origins`` ("run.yaml:3", by path or enclosing path)."""
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
    """Return ``loc`` without pydantic's labels for union members."""
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
    if not keys:
        # Keys that do not go together: the message names them, and the whole configuration says no more.
        return f"{head} does not fit together; allowed: {' or '.join(problem.allowed)}"
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
    """Return the classes that a path may hold (several for a union)."""
    classes = [model]
    is_name = False
    for key in keys:
        if is_name or isinstance(key, int):
            # A name that the user chose, such as the one in policies.main, or an index: the section is below it.
            is_name = False
            continue
        annotations = [cls.model_fields[key].annotation for cls in classes if key in cls.model_fields]
        is_name = any(get_origin(annotation) is dict for annotation in annotations)
        classes = [cls for annotation in annotations for cls in _models_in(annotation)]
    return classes


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [cls for argument in get_args(annotation) for cls in _models_in(argument)]


def _meaning(model: type[BaseModel], keys: Keys) -> str:
    for cls in _models_at(model, keys[:-1]):
        field = cls.model_fields.get(str(keys[-1]))
        if field is not None and field.description:
            return f" ({field.description})"
    return ""


def _nearest(model: type[BaseModel], keys: Keys) -> str:
    parents = _models_at(model, keys[:-1])
    names = list(dict.fromkeys(name for cls in parents for name in cls.model_fields))
    prefix, name = "".join(f"{key}." for key in keys[:-1]), str(keys[-1])
    if issubclass(model, Section) and name in model.foreign_keys:
        return f"did you mean {model.foreign_keys[name]}?"
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f"did you mean {prefix}{close[0]}?"
    # The shallowest place wins: a key of the policy, not the one of its critic.
    everywhere = dict(sorted(_all_keys(model, "", ()), key=lambda found_key: -found_key[1].count(".")))
    if name in everywhere:
        return f"did you mean {everywhere[name]}?"
    if close := difflib.get_close_matches(name, everywhere, n=1, cutoff=0.75):
        return f"did you mean {everywhere[close[0]]}?"
    return f"known keys here: {', '.join(names) or 'none'}"


def _all_keys(model: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        subsections = [cls for cls in _models_in(field.annotation) if cls not in above]
        # In a section whose keys are names that the user chose, such as policies.main.
        pattern = f"{name}.{(field.examples or ['NAME'])[0]}" if get_origin(field.annotation) is dict else name
        for cls in subsections:
            yield from _all_keys(cls, f"{prefix}{pattern}.", (*above, model))
        yield name, f"{prefix}{name}"


ModelT = TypeVar("ModelT", bound=BaseModel)


class _Located(str):
    """Text with the directory that relative paths in it start from."""

    __slots__ = ("base",)
    base: Path

    @classmethod
    def wrap(cls, value: Any, base: Path) -> Any:
        """Return ``value`` with every string in it wrapped, keys aside."""
        if isinstance(value, str):
            located = cls(value)
            located.base = base
            return located
        if isinstance(value, dict):
            return {key: cls.wrap(item, base) for key, item in value.items()}
        if isinstance(value, list):
            return [cls.wrap(item, base) for item in value]
        return value


def _resolve(value: Any) -> Any:
    if not isinstance(value, (str, Path)):
        return value
    if not str(value):
        raise ValueError("a path, not the empty text")
    base = value.base if isinstance(value, _Located) else Path.cwd()
    return base / Path(str(value)).expanduser()


_RESOLVE = BeforeValidator(_resolve)

ConfigPath = Annotated[Path, _RESOLVE, PlainSerializer(lambda path: str(path.absolute()))]
"""A path in a config: relative to the file that says it, or to the working directory in an override, in a default
or in Python. Absolute once it is loaded."""


def _resolve_from(value: Any, *, names: bool) -> Any:
    if not isinstance(value, (str, Path)):
        return value
    text = str(value)
    base = value.base if isinstance(value, _Located) else Path.cwd()
    for end in sorted({len(text), *(mark.start() for mark in re.finditer("[:?]", text))}, reverse=True):
        file = Path(text[:end]).expanduser()
        # A registered name stays a name, even if a folder of that name exists.
        if end and not (names and not file.suffix and "/" not in text[:end]) and (base / file).exists():
            return f"{base / file}{text[end:]}"
    return text


ConfigReference = Annotated[str, BeforeValidator(lambda value: _resolve_from(value, names=True))]
"""Text that may begin with a file: ``tasks.jsonl``, ``env.py:Class``, ``tasks.py:make?n=3``. A file that exists is made
absolute as in :data:`ConfigPath`; anything else (a registered name, ``pkg.mod:Class``) stays as it is."""

ConfigSource = Annotated[str, BeforeValidator(lambda value: _resolve_from(value, names=False))]
"""As :data:`ConfigReference`, where no name is registered: a folder is one however it is called (``tasks: rows``)."""


def _resolve_values(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _resolve_values(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_resolve_values(item, key) for item in value]
    # Where a section names a folder, no name is registered.
    return _resolve_from(value, names=key not in ("model", "tasks")) if isinstance(value, str) else value


ConfigValues = Annotated[dict[str, Any], BeforeValidator(_resolve_values)]
"""Settings of another section, to be loaded later: texts in them that begin with a file or folder that exists are made
absolute, as in :data:`ConfigReference`."""


def shorthand(key: str) -> BeforeValidator:
    """Return a validator by which a text stands for the section with this ``key``."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars; duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            mark = key.start_mark
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{mark.name}:{mark.line + 1}: a key must be text, not a list or a section")
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(f"{mark.name}:{mark.line + 1}: the key {key.value!r} occurs twice in one section")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader` reads back equal."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        """Repeat equal values instead of writing anchors."""
        return True


_INTEGER = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")  # fmt: skip  # noqa: E501
_SCALARS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", _INTEGER, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN\0"),
    ("merge", re.compile(r"^<<$"), "<"),
)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _use_yaml_1_2(*classes: type[_Loader] | type[_Dumper]) -> None:
    for cls in classes:
        cls.yaml_implicit_resolvers = {}
        for name, pattern, first in _SCALARS:
            letters = ["" if letter == "\0" else letter for letter in first]
            cls.add_implicit_resolver(f"tag:yaml.org,2002:{name}", pattern, letters)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these line breaks as they are and folds them to spaces when it reads them; escaped they survive.
    style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_use_yaml_1_2(_Loader, _Dumper)
_Dumper.add_representer(str, _represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def load_config(
    model: type[ModelT],
    path: str | Path | Sequence[str | Path] | None = None,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    *,
    root: str | None = None,
    incomplete: bool = False,
) -> ModelT:
    """Read, merge and check a configuration; extension modules are imported before (:mod:`turnwise.plugins`).

    Later sources win key by key: ``defaults``, the files in order, the overrides. A list is replaced as a whole, except
    by an override with an index.

    Args:
        model: The pydantic class of the configuration.
        path: A YAML file, several of them, or None.
        overrides: ``dotted.path=value`` with the value in YAML (``optim.lr=1e-4``, ``evals.0.n=4``, ``a=[1, 2]``).
        defaults: Values below every file.
        root: The key that holds the list of a file whose top level is a list; None forbids such files.
        incomplete: Refuse unknown keys only: keys that are missing will be given later, and the result is of no use.

    Raises:
        ConfigError: Every problem that was found, with its path, value, source and remedy.
    """
    load_extensions()
    files = [] if path is None else [path] if isinstance(path, (str, Path)) else list(path)
    data: dict[str, Any] = _Located.wrap(dict(defaults or {}), Path.cwd())
    origins: dict[Keys, str] = {}
    for file in files:
        source = Path(file)
        content, lines = _read_yaml(source, root)
        data = merge_sections(data, _Located.wrap(content, source.absolute().parent))
        origins |= lines
    for text in overrides:
        _override(data, text, origins)
    try:
        loaded = model.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        if incomplete:
            errors = [problem for problem in errors if problem["type"] == "extra_forbidden"]
            loaded = model.model_construct()
        if errors:
            raise ConfigError(report_problems(model, data, origins, errors)) from None
    _settle(loaded)
    return loaded


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` texts as nested values, without a pydantic class. Raises ConfigError."""
    data: dict[str, Any] = {}
    for text in overrides:
        _override(data, text, {})
    settled: dict[str, Any] = _settle(data)
    return settled


def dump_config(config: BaseModel) -> str:
    """Return a configuration as YAML with absolute paths that :func:`load_config` reads back equal."""
    # Not model_dump(mode="json"): it writes an infinity in a free section as null.
    return write_yaml(to_jsonable_python(config.model_dump(), inf_nan_mode="constants"))


def write_yaml(value: Any) -> str:
    """Return plain values as YAML 1.2, in their order, that :func:`read_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_yaml(text: str) -> Any:
    """Return the value of a YAML 1.2 text, such as that of a run's ``config.yaml``.

    ``yaml.safe_load`` reads YAML 1.1, where ``yes`` is true, ``12:30`` is 750 and ``2026-01-31`` is a date.

    Raises:
        yaml.YAMLError: It is not YAML.
        ConfigError: A key is given twice in one section, or is no text.
    """
    return yaml.load(text, Loader=_Loader)


def _read_yaml(file: Path, root: str | None) -> tuple[dict[str, Any], dict[Keys, str]]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file {file} is not UTF-8: {error}") from error
    loader = _Loader(text)
    loader.name = str(file)
    try:
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise ConfigError(f"{position}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: not YAML: {error}") from error
    finally:
        loader.dispose()
    if content is None:
        return {}, {}
    if root is not None and isinstance(content, list):
        return {root: content}, dict(_lines(node, file, (root,)))
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: holds {shown(content)}; a config file holds 'key: value' pairs")
    return content, dict(_lines(node, file, ()))


def _lines(node: yaml.Node | None, file: Path, keys: Keys) -> Iterator[tuple[Keys, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*keys, key.value), f"{file.name}:{key.start_mark.line + 1}"
            yield from _lines(value, file, (*keys, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*keys, index), f"{file.name}:{value.start_mark.line + 1}"
            yield from _lines(value, file, (*keys, index))


def merge_sections(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values in which those of ``above`` win key by key."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge_sections(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def differences(key: str, saved: Any, current: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys below ``key`` in which two nested values differ, each with both values."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        for name in (*saved, *(added for added in current if added not in saved)):
            yield from differences(f"{key}.{name}" if key else name, saved.get(name), current.get(name))
    elif saved != current:
        yield key, saved, current


def _override(data: dict[str, Any], text: str, origins: dict[Keys, str]) -> None:
    dotted, equals, value_text = text.partition("=")
    names = [name for name in re.split(r"\.|\[(?=\d+\])|\](?=\.|\[|$)", dotted.strip()) if name]
    if not equals or not names:
        raise ConfigError(f"the override {text!r} is not of the form key=value, such as optim.lr=1e-4")
    try:
        value = _Located.wrap(read_yaml(value_text), Path.cwd())
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {text!r} is not YAML: {error}") from error
    section: Any = data
    keys: list[str | int] = []
    for position, name in enumerate(names):
        key = _key_into(section, name, ".".join(str(step) for step in keys), text)
        keys.append(key)
        if position == len(names) - 1:
            if isinstance(section, list) and key == len(section):
                section.append(value)
            else:
                section[key] = value
        elif isinstance(section, list):
            if key == len(section):
                section.append({})
            section = section[key]
        else:
            if section.get(key) is None:
                section[key] = {}
            section = section[key]
    for path in [path for path in origins if path[: len(keys)] == tuple(keys)]:
        del origins[path]
    origins[tuple(keys)] = f"override {text}"


def _key_into(section: Any, name: str, path: str, text: str) -> Any:
    if isinstance(section, dict):
        if name.isdigit() and not section and path:
            raise ConfigError(f"the override {text!r} indexes {path}, which is not a list: give the whole list")
        return name
    if not isinstance(section, list):
        raise ConfigError(f"the override {text!r} goes into {path}, which is {shown(section)}, not a section")
    if not name.isdigit() or int(name) > len(section):
        end = len(section)
        raise ConfigError(f"the override {text!r} goes into {path} at {name!r}; allowed: 0 to {end} ({end} appends)")
    return int(name)


def _settle(value: Any) -> Any:
    """Return ``value`` with located text made plain and default paths absolute, in place."""
    if isinstance(value, _Located):
        return str(value)
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        for name, item in list(value.__dict__.items()):
            if isinstance(item, Path) and name in fields and _RESOLVE in fields[name].metadata:
                item = Path.cwd() / item
            # Not setattr: a frozen or validating model would refuse or check again what has been checked.
            value.__dict__[name] = _settle(item)
    elif isinstance(value, dict):
        for key in list(value):
            value[key] = _settle(value[key])
    elif isinstance(value, list):
        value[:] = [_settle(item) for item in value]
    return value
