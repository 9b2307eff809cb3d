"""Functions by configuration name or reference, with options checked against their signature."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from turnwise.config import report_problems
from turnwise.errors import ConfigError, RegistryError
from turnwise.plugins import load_object


@dataclass(frozen=True, slots=True)
class ConfiguredFunction:
    """A configured function with its options.

    Attributes:
        name: Its configuration name.
        function: The formula.
        options: Its checked options, without defaults.
        reads: The further data that it takes by name.
    """

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    reads: frozenset[str] = frozenset()

    def __call__(self, *arguments: Any, **data: Any) -> Any:
        """Call the function with its arguments, its options, and the part of ``data`` that it reads."""
        return self.with_data(**data)(*arguments)

    def with_data(self, **data: Any) -> Callable[..., Any]:
        """Bind the options, and the part of ``data`` that the function reads."""
        return partial(self.function, **{name: data[name] for name in self.reads}, **self.options)


def find(name: str, known: Mapping[str, Any], key: str) -> Any:
    """Look a name up in a registry, or load a reference (``pkg.mod:function``, ``path/file.py:function``).

    ``key`` is the configuration key of the name, for messages.

    Raises:
        RegistryError: Neither; the message suggests the nearest name.
    """
    if name in known:
        return known[name]
    if ":" not in name and "." not in name:
        close = nearest(name, known)
        hint = f"did you mean {close!r}? " if close else ""
        raise RegistryError(
            f"{key} is {name!r}; {hint}known: {', '.join(sorted(known))}, or a custom one as pkg.mod:function"
        )
    try:
        found = load_object(name, key)
    except ConfigError as error:
        raise RegistryError(str(error)) from error
    if not callable(found):
        raise RegistryError(f"{key} is {name!r}, which is a {type(found).__name__}; it must be a function")
    return found


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the closest known name, ignoring case and underscores; None where none is close."""
    plain = {re.sub(r"[^a-z0-9]", "", each.lower()): each for each in sorted(known)}
    meant = re.sub(r"[^a-z0-9]", "", name.lower())
    longer = [each for each in plain if len(meant) > 2 and each.startswith(meant)]
    close = sorted(longer, key=len) or difflib.get_close_matches(meant, plain, n=1)
    return plain[close[0]] if close else None


def bind(
    name: str,
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    key: str,
    arguments: Collection[str],
    data: Collection[str],
) -> ConfiguredFunction:
    """Check options against a function's signature.

    Parameters beyond the positional ``arguments`` that are not in ``data`` are options, validated by their annotations.
    ``key`` is the configuration key of the options (``algorithm.loss_options``), for messages.

    Raises:
        RegistryError: Other positional arguments, or an option is unknown, missing or invalid.
    """
    parameters = list(_signature(function, key, name).parameters.values())
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(arguments):
        raise RegistryError(
            f"{key.removesuffix('_options')} is {name!r}, which takes ({', '.join(each.name for each in positional)}); "
            f"it is called with ({', '.join(arguments)}), options by keyword"
        )
    rest = [each for each in parameters[len(arguments) :] if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    free = any(each.kind is each.VAR_KEYWORD for each in parameters)
    reads = frozenset(each.name for each in rest if each.name in data)
    fields: dict[str, Any] = {
        each.name: (
            Any if each.annotation is each.empty or isinstance(each.annotation, str) else each.annotation,
            ... if each.default is each.empty else each.default,
        )
        for each in rest
        if each.name not in reads
    }
    settings = ConfigDict(extra="allow" if free else "forbid", arbitrary_types_allowed=True)
    options = create_model("Options", __config__=settings, **fields)
    section, _, last = key.partition(".")
    model = create_model("Outer", **{section: (create_model("Inner", **{last: (options, ...)}), ...)})  # type: ignore[call-overload]
    held = {section: {last: dict(given)}}
    try:
        model.model_validate(held)
    except ValidationError as error:
        problems = report_problems(model, held, {}, error.errors(include_url=False))
        raise RegistryError(f"{name}: {problems}") from error
    checked = dict(options.model_validate(dict(given)))
    return ConfiguredFunction(name, function, {each: checked[each] for each in given}, reads)


def _signature(function: Callable[..., Any], key: str, name: str) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:
        # An annotation that stands under TYPE_CHECKING: the option is then taken as it is.
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RegistryError(
            f"{key.removesuffix('_options')} is {name!r}, whose arguments cannot be read: {error}"
        ) from error
