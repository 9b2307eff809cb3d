"""Recipes: how programs are run as agents; those of the known ones are in ``recipes.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from turnwise.errors import ConfigError, RegistryError, nearest
from turnwise.plugins import load_object

Dialect = Literal["openai", "anthropic", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a program is run. Texts hold placeholders; see :data:`~turnwise.ext.programs.workdir.PLACEHOLDERS`.

    Attributes:
        dialect: Model API that it speaks, hence the variables that carry the base URL.
        files: Files written before the start: path to text.
        tool_arguments: Appended to ``command`` where the environment has tools.
        tool_files: Files written then, in place of ``files`` of the same path.
        result: Location of the answer: ``message``, ``stdout``, ``file:PATH`` or ``json:PATH#a.b`` (PATH may be
            ``stdout``).
    """

    command: tuple[str, ...] = ()
    dialect: Dialect = "both"
    prompt: str = "{task}"
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    tool_arguments: tuple[str, ...] = ()
    tool_files: Mapping[str, str] = field(default_factory=dict)
    result: str = "message"


def _read_recipe(
    *, config: str = "", command: Sequence[str] = (), tool_arguments: Sequence[str] = (), **fields: Any
) -> Recipe:
    for name in ("files", "tool_files"):
        files: dict[str, str] = fields.get(name, {})
        fields[name] = {path: text.replace("<config>", config) for path, text in files.items()}
    return Recipe(command=tuple(command), tool_arguments=tuple(tool_arguments), **fields)


_RECIPES: Final[Mapping[str, Recipe]] = {
    name: _read_recipe(**record)
    for name, record in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}


def recipe_of(name: str) -> Recipe:
    """Return a recipe by name or by reference (``pkg.mod:RECIPE``).

    Raises:
        RegistryError: No recipe has that name.
        ConfigError: The reference cannot be loaded, or is not a recipe.
    """
    if name in _RECIPES:
        return _RECIPES[name]
    if not any(mark in name for mark in ":./"):
        names = f"known are {', '.join(_RECIPES)}, or pkg.mod:RECIPE"
        raise RegistryError(f"no recipe is called {name!r}{nearest(name, _RECIPES)}; {names}")
    loaded = load_object(name, "recipe")
    if not isinstance(loaded, Recipe):
        raise ConfigError(f"recipe {name!r} is a {type(loaded).__name__}, not a turnwise.ext.programs.Recipe")
    return loaded
