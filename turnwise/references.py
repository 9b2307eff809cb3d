"""From a reference such as ``pkg.mod:Class`` or ``path/file.py:Class`` to the object that it names.

Owns: the forms of references, the way back (:func:`reference_to`) and the wording of what can be wrong with one.
Refuses: names without a module; short names belong to the registry of what they name.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from turnwise.errors import ConfigError

# How modules are called that are made of files.
_FILE = "turnwise_file_"
# The names of modules that were imported otherwise, by their files: every episode asks for its environment.
_IMPORTED: dict[str, str] = {}


def load_object(reference: str, what: str) -> Any:
    """Return what a reference names.

    Args:
        reference: ``pkg.mod:Name``, ``pkg.mod.Name`` or ``path/file.py:Name``; ``Name`` may be ``Outer.Inner``.
        what: What is looked for ("environment", "agent"), for the message.

    Raises:
        ConfigError: The reference has another form, or its module or name cannot be found or imported.
    """
    owner, colon, name = reference.rpartition(":")
    if not colon:
        owner, _, name = reference.rpartition(".")
    if not owner or not name or reference.endswith(".py"):
        raise ConfigError(
            f"{what} {reference!r} is no reference: write pkg.mod:Name, pkg.mod.Name or path/to/file.py:Name"
        )
    module = load_file(owner, f"{what} {reference!r}") if owner.endswith(".py") else _import(owner, reference, what)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [known for known in vars(found) if not known.startswith("_")]
            close = difflib.get_close_matches(part, public, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{what} {reference!r}: {owner} has no {part!r}{hint}") from None
    return found


def load_class_from_fqn(reference: str, what: str) -> type[Any]:
    """Return the class that a reference names; :func:`load_object` for classes only.

    Raises:
        ConfigError: As :func:`load_object`, and where something else than a class stands there.
    """
    found = load_object(reference, what)
    if not isinstance(found, type):
        raise ConfigError(f"{what} {reference!r} is {_kind(found)}, not a class")
    return found


def _import(name: str, reference: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{what} {reference!r}: there is no module {error.name!r}; is its package installed, or on PYTHONPATH?"
            ) from error
        raise ConfigError(f"{what} {reference!r}: importing {name} failed: {error}") from error
    except Exception as error:  # a module of the user's runs here: whatever it raises is named
        raise ConfigError(f"{what} {reference!r}: importing {name} failed: {type(error).__name__}: {error}") from error


def place_of(module: str) -> str:
    """Return what a message calls a module: its name, or the file that :func:`load_file` made it of."""
    file = vars(sys.modules[module]).get("__file__") if module.startswith(_FILE) and module in sys.modules else None
    return Path(file).name if file else module


def load_file(file: str | Path, what: str) -> ModuleType:
    """Return the module that a Python file makes. It is run when it is first loaded, however often that is asked.

    Args:
        file: The file.
        what: What it is loaded for, as a message begins.

    Raises:
        ConfigError: There is no such file, or running it failed; the message names the line.
    """
    path = _resolved(str(file), os.getcwd())
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path}")
    program = sys.modules.get("__main__")
    file_run = None if program is None else vars(program).get("__file__")
    if program is not None and file_run is not None and _resolved(file_run, os.getcwd()) == path:
        # The file is the program that runs: run once more, it would register everything a second time.
        return program
    # A name that only the path decides: the class of an object pickled here is found again elsewhere.
    name = f"{_FILE}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    known = _imported(str(path))
    if known is not None:
        # It was imported as a module: run once more, it would register everything a second time.
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a file of the user's runs here: whatever it raises is named
        del sys.modules[name]
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"{what}: running {_place(path, error)} failed: {type(error).__name__}: {text}") from error
    return module


@functools.lru_cache(maxsize=256)
def _resolved(file: str, folder: str) -> Path:
    """Return the path of a file as it is seen from a folder; every episode asks for its environment's."""
    return (folder / Path(file).expanduser()).resolve()


def _imported(file: str) -> ModuleType | None:
    """Return the module that was imported of a file, if any."""
    before = sys.modules.get(_IMPORTED.get(file, ""))
    if before is not None and vars(before).get("__file__") == file:
        return before
    for name, each in list(sys.modules.items()):
        if isinstance(each, ModuleType) and vars(each).get("__file__") == file:
            _IMPORTED[file] = name
            return each
    return None


def _place(path: Path, error: Exception) -> str:
    """Return where in a file an error arose, as ``file:line``."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _kind(found: Any) -> str:
    return f"a {type(found).__name__}"


def reference_to(target: Any, what: str) -> str:
    """Return the reference by which :func:`load_object` finds a class or function again.

    What stands in the program that runs is named by its file, so that a later process finds it; in a notebook or an
    interpreter, where there is no file, by ``__main__``, which only this process finds.

    Args:
        target: The class or function.
        what: What it is ("environment", "agent"), for the message.

    Raises:
        ConfigError: It has no name, or under its name something else is found.
    """
    module, name = _name_of(target)
    if module is None or name is None:
        raise ConfigError(f"{what} {target!r} has no name that another process could find: name a class or function")
    if "<" in name:
        raise ConfigError(
            f"{what} {name} stands inside a function, where no other process finds it: write it at the top of its file"
        )
    owner = module
    if module == "__main__" or module.startswith(_FILE):
        file = vars(sys.modules[module]).get("__file__")
        owner = module if file is None else str(Path(file).resolve())
    reference = f"{owner}:{name}"
    if load_object(reference, what) is not target:
        raise ConfigError(
            f"{what} {reference} names something else than what was given: give it a name of its own at the top of its "
            "file"
        )
    return reference


def _name_of(target: Any) -> tuple[str | None, str | None]:
    """Return module and name of what a def or a class made, or of what a decorator made of one."""
    named = inspect.unwrap(target) if callable(target) else target
    if isinstance(named, type) or inspect.isroutine(named):
        return named.__module__, named.__qualname__
    return None, None
