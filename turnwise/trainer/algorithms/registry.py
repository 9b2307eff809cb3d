"""Functions by configuration name or reference, with options checked against their signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError, create_model

from turnwise.config import report_problems
from turnwise.errors import ConfigError, RegistryError, nearest
from turnwise.plugins import check_contract, load_object, registering

C = TypeVar("C", bound=type[Any])


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


def find(name: str, registry: Mapping[str, Any], key: str) -> Any:
    """Look a name up in a registry, or load a reference (``pkg.mod:function``, ``path/file.py:function``).

    ``key`` is the configuration key of the name, for messages.

    Raises:
        RegistryError: Neither; the message suggests the nearest name.
    """
    if name in registry:
        return registry[name]
    if ":" not in name and "." not in name:
        names = ", ".join(sorted(registry))
        raise RegistryError(
            f"{key} is {name!r}{nearest(name, registry)}; known: {names}, or a custom one as pkg.mod:function"
        )
    try:
        function = load_object(name, key)
    except ConfigError as error:
        raise RegistryError(str(error)) from error
    if not callable(function):
        raise RegistryError(f"{key} is {name!r}, which is a {type(function).__name__}; it must be a function")
    return function


@dataclass(frozen=True, slots=True)
class ClassRegistry:
    """Classes of one contract, by the name that a configuration uses.

    Attributes:
        contract: The abstract class that they derive from.
        kind: What they are ("logger"), for messages.
        key: The configuration key of the name, for messages.
        classes: Classes, or references to them, by name.
    """

    contract: type[Any]
    kind: str
    key: str
    classes: dict[str, type[Any] | str]

    def register(self, name: str) -> Callable[[C], C]:
        """Register a class by a decorator. Raises RegistryError where the name is taken, or the class is none."""
        return registering(name, self.classes, self.kind, partial(check_contract, self.contract, self._what(name)))

    def find(self, name: str) -> type[Any]:
        """Return a class by its name or by reference.

        Raises:
            RegistryError: There is none, or it does not fulfil the contract.
        """
        entry = find(name, self.classes, self.key)
        loaded = load_object(entry, self.kind) if isinstance(entry, str) else entry
        return check_contract(self.contract, self._what(name), loaded)

    def _what(self, name: str) -> str:
        return f"{self.kind} {name!r}"


def bind(
    name: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
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
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter.name for parameter in parameters if parameter.kind in by_position]
    if len(positional) < len(arguments):
        raise RegistryError(
            f"{key.removesuffix('_options')} is {name!r}, which takes ({', '.join(positional)}); "
            f"it is called with ({', '.join(arguments)}), options by keyword"
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    option_parameters = [parameter for parameter in parameters[len(arguments) :] if parameter.kind not in variadic]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    reads = frozenset(parameter.name for parameter in option_parameters if parameter.name in data)
    fields = {parameter.name: _field(parameter) for parameter in option_parameters if parameter.name not in reads}
    settings = ConfigDict(extra="allow" if takes_any else "forbid", arbitrary_types_allowed=True)
    model = create_model("Options", __config__=settings, **fields)  # type: ignore[call-overload]
    try:
        checked = dict(model.model_validate(dict(options)))
    except ValidationError as error:
        # Within their section, by which the message names the keys.
        section, _, option_key = key.partition(".")
        option_model = create_model("Inner", **{option_key: (model, ...)})  # type: ignore[call-overload]
        outer = create_model("Outer", **{section: (option_model, ...)})  # type: ignore[call-overload]
        errors = error.errors(include_url=False)
        for problem in errors:
            problem["loc"] = (section, option_key, *problem["loc"])
        problems = report_problems(outer, {section: {option_key: dict(options)}}, {}, errors)
        raise RegistryError(f"{name}: {problems}") from error
    return ConfiguredFunction(name, function, {option: checked[option] for option in options}, reads)


def _field(parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Return the annotation and the default of an option, as ``create_model`` takes them."""
    untyped = parameter.annotation is parameter.empty or isinstance(parameter.annotation, str)
    default = ... if parameter.default is parameter.empty else parameter.default
    return Any if untyped else parameter.annotation, default


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
