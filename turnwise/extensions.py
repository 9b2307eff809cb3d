"""Modules from outside that register what a configuration may name.

Owns: :func:`load_extensions`: which modules are imported, when, and the wording of what can be wrong with one. Refuses:
the registries; a module of this kind calls ``register_loss``, ``register_engine``, ``register`` and the like.

Two ways lead here. The environment variable ``TURNWISE_EXTERNAL_MODULES`` names modules or files, separated by commas;
a package that is installed names one as an entry point of the group ``turnwise.extensions``. Both are imported once per
process, before a configuration is checked. Processes that a run starts inherit the variable, and so import them too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Final

from turnwise.errors import ConfigError
from turnwise.references import load_file

MODULES: Final = "TURNWISE_EXTERNAL_MODULES"
"""Names of modules, or paths of files ending in .py, separated by commas."""
CHOSEN: Final = "TURNWISE_EXTENSIONS"
"""Which entry points are loaded: ``all`` (the default), ``none``, or their names separated by commas."""
GROUP: Final = "turnwise.extensions"
"""The group of entry points."""

_loaded: set[str] = set()
_done: dict[str, str | None] = {}


def load_extensions() -> list[str]:
    """Import what the environment variable and installed packages name, whatever of it was not imported yet.

    Returns:
        What was imported by this call: modules, files and entry points by name, in order.

    Raises:
        ConfigError: One cannot be found or imported, or an entry point is asked for that no package has; the message
            names it, the cause and the remedy.
    """
    said = {variable: os.environ.get(variable) for variable in (MODULES, CHOSEN)}
    if said == _done:
        # Asked before every configuration: what is installed is looked up once.
        return []
    done: list[str] = []
    for entry in _entries():
        if _begin(f"{GROUP}:{entry.name}"):
            done.append(entry.name)
            _enter(entry)
    for name in _listed(MODULES):
        if _begin(name):
            done.append(name)
            _import(name)
    _done.update(said)
    return done


def _begin(key: str) -> bool:
    """Note that something is being loaded; False where it was before. A module may load a configuration itself."""
    fresh = key not in _loaded
    _loaded.add(key)
    return fresh


def _listed(variable: str) -> list[str]:
    return [name for each in os.environ.get(variable, "").split(",") if (name := each.strip())]


def _entries() -> Iterator[EntryPoint]:
    """Yield the entry points that are wanted, in the order of their names."""
    chosen = _listed(CHOSEN) or ["all"]
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if chosen == ["none"]:
        return
    if chosen == ["all"]:
        chosen = sorted(found)
    for name in chosen:
        if name not in found:
            known = ", ".join(sorted(found)) or "none"
            raise ConfigError(
                f"{CHOSEN} names {name!r}, but no installed package has an entry point of that name in {GROUP} "
                f"(there are: {known}): install it, or take the name out"
            )
        yield found[name]


def _enter(entry: EntryPoint) -> None:
    """Load an entry point: a module is imported, a function is called besides."""
    owner = entry.dist.name if entry.dist is not None else "an unknown package"
    what = f"the extension {entry.name!r} ({entry.value}, of the package {owner})"
    remedy = f"mend or uninstall {owner}, or leave it out with {CHOSEN}=none"
    try:
        found = entry.load()
        if callable(found):
            found()
    except Exception as error:  # code of others runs here: whatever it raises is named
        _loaded.discard(f"{GROUP}:{entry.name}")
        raise ConfigError(f"{what} cannot be loaded: {_said(error)}; {remedy}") from error
    if not callable(found) and not isinstance(found, ModuleType):
        raise ConfigError(
            f"{what} is a {type(found).__name__}: it must name a module, or a function without arguments; {remedy}"
        )


def _import(name: str) -> None:
    remedy = f"mend it, or take it out of {MODULES}"
    try:
        if name.endswith(".py"):
            load_file(name, f"{MODULES} names {name!r}")
        else:
            importlib.import_module(name)
    except ConfigError as error:
        _loaded.discard(name)
        raise ConfigError(f"{error}; {remedy}") from error
    except ModuleNotFoundError as error:
        _loaded.discard(name)
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            remedy = f"install its package, put its folder on PYTHONPATH, or take it out of {MODULES}"
        raise ConfigError(f"{MODULES} names {name!r}: {error}; {remedy}") from error
    except Exception as error:  # code of others runs here: whatever it raises is named
        _loaded.discard(name)
        raise ConfigError(f"{MODULES} names {name!r}: importing it failed: {_said(error)}; {remedy}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
