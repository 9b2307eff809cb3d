"""References such as ``pkg.mod:Class`` or ``path/file.py:Class`` to objects, plug-ins by name, and extensions.

Plug-ins are entry points: a package adds an environment, agent, sandbox backend, row format or command by one of the
group ``turnwise.environments``, ``turnwise.agents`` and so on, whose value is ``pkg.module:Name``, imported on first
use. What ships in ``turnwise.ext`` is registered in the same form, so that it works from a checkout, too.

Extensions are the modules or files of the environment variable ``TURNWISE_EXTERNAL_MODULES`` (separated by commas) and
the entry points of the group ``turnwise.extensions``. They are imported once per process, before a configuration is
checked; child processes inherit the variable.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

from turnwise.errors import ConfigError, RegistryError, nearest

D = TypeVar("D", bound=Callable[..., Any])

# Prefix of the names of modules that are loaded from files.
_FILE = "turnwise_file_"
# Names of modules that were imported by other means, by file: a cache, as every episode looks up its environment.
_IMPORTED: dict[str, str] = {}
# Folders of users' files, whose modules can be imported by name.
_FOLDERS: set[Path] = set()


def load_object(reference: str, what: str) -> Any:
    """Return the object of a reference.

    Args:
        reference: ``pkg.mod:Name``, ``pkg.mod.Name`` or ``path/file.py:Name``; ``Name`` may be ``Outer.Inner``.
        what: The kind of object ("environment", "agent"), for error messages.

    Raises:
        ConfigError: The reference is malformed, or its module or name cannot be imported.
    """
    owner, colon, name = reference.rpartition(":")
    if not colon:
        owner, _, name = reference.rpartition(".")
    if not owner or not name or reference.endswith(".py"):
        raise ConfigError(
            f"{what} {reference!r} is not a reference: write pkg.mod:Name, pkg.mod.Name or path/to/file.py:Name"
        )
    module = load_file(owner, f"{what} {reference!r}") if owner.endswith(".py") else _import(owner, reference, what)
    target: Any = module
    for part in name.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            public = [public_name for public_name in vars(target) if not public_name.startswith("_")]
            raise ConfigError(f"{what} {reference!r}: {owner} has no {part!r}{nearest(part, public)}") from None
    return target


def load_class_from_fqn(reference: str, what: str) -> type[Any]:
    """Return the class of a reference; raise ConfigError as :func:`load_object` and for non-classes."""
    cls = load_object(reference, what)
    if not isinstance(cls, type):
        raise ConfigError(f"{what} {reference!r} is a {type(cls).__name__}, not a class")
    return cls


def register_entry(
    name: str, thing: Any, registry: dict[str, Any], kind: str, of: Callable[[Any], Any] = lambda entry: entry
) -> None:
    """Add an entry to a registry. Adding the same definition again (a reimported module) is allowed.

    ``kind`` ("loss") is for messages; ``of`` returns the function or class of an entry.

    Raises:
        RegistryError: The name contains ``:``, ``.`` or ``/``, or is taken by another definition.
    """
    definition = _definition(of(thing))
    if not name or any(mark in name for mark in ":./"):
        raise RegistryError(
            f"{name!r} cannot be the name of the {kind} {definition}: ':', '.' and '/' are reserved for references"
        )
    entry = of(registry.get(name, thing))
    if isinstance(entry, str) and entry != definition:
        entry = load_object(entry, kind)
    if entry != definition and (registered := _definition(entry)) != definition:
        raise RegistryError(f"the {kind} name {name!r} is taken by {registered}; {definition} needs another name")
    registry[name] = thing


def registering(
    name: str, registry: dict[str, Any], kind: str, check: Callable[[Any], object] = callable
) -> Callable[[D], D]:
    """Return a decorator that adds a class or function to a registry as :func:`register_entry`, after a ``check``."""

    def register(thing: D) -> D:
        check(thing)
        register_entry(name, thing, registry, kind)
        return thing

    return register


def check_contract(contract: type[Any], what: str, cls: Any) -> type[Any]:
    """Return a class that derives from an abstract one and defines its methods; ``what`` it is, for messages.

    Raises:
        RegistryError: It does not.
    """
    if not (isinstance(cls, type) and issubclass(cls, contract)):
        raise RegistryError(f"{what} is {cls!r}: it must derive from {contract.__module__}.{contract.__qualname__}")
    if inspect.isabstract(cls):
        raise RegistryError(f"{what} does not define {', '.join(sorted(vars(cls)['__abstractmethods__']))}")
    return cls


def _definition(thing: Any) -> str:
    """Return the qualified name of a definition, with the ``id`` of lambdas and local functions."""
    definition = f"{thing.__module__}:{thing.__qualname__}"
    return f"{definition} at {id(thing):#x}" if "<" in definition else definition


def find_class(name: str, registry: Mapping[str, type[Any]], what: str) -> type[Any]:
    """Return the class that is registered under a name, or else that of a reference.

    Raises:
        ConfigError: There is none; or as :func:`load_class_from_fqn`.
    """
    if name in registry:
        return registry[name]
    if registry and ":" not in name and "." not in name:
        raise ConfigError(
            f"{what} {name!r} is not registered{nearest(name, registry)}; known: {', '.join(sorted(registry))}, or a "
            "class as pkg.mod:Class or path/to/file.py:Class"
        )
    return load_class_from_fqn(name, what)


def _import(name: str, reference: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            remedy = "is its package installed, or on PYTHONPATH?"
            files = [file.stem for file in Path().glob("*.py")]
            if match := difflib.get_close_matches(name, files, 1):
                remedy = f"a file of this folder is written with its path: ./{match[0]}.py:{reference[len(name) + 1 :]}"
            raise ConfigError(f"{what} {reference!r}: no module named {error.name!r}; {remedy}") from error
        raise ConfigError(f"{what} {reference!r}: importing {name} failed: {error}") from error
    except Exception as error:  # a user's module runs here: whatever it raises is named
        raise ConfigError(f"{what} {reference!r}: importing {name} failed: {type(error).__name__}: {error}") from error


def module_label(module: str) -> str:
    """Return a module's name for messages: its file where :func:`load_file` made it."""
    file = vars(sys.modules[module]).get("__file__") if module.startswith(_FILE) and module in sys.modules else None
    return Path(file).name if file else module


def load_file(file: str | Path, what: str) -> ModuleType:
    """Return the module of a Python file, executed once per process; ConfigError names the line that raised."""
    path = _resolved(str(file), os.getcwd())
    if not path.is_file():
        raise ConfigError(f"{what}: no such file: {path}")
    program = sys.modules.get("__main__")
    file_run = None if program is None else vars(program).get("__file__")
    if program is not None and file_run is not None and _resolved(file_run, os.getcwd()) == path:
        # The file is the program that runs: run once more, it would register everything a second time.
        return program
    # A name that only the path decides: the class of an object pickled here is found again elsewhere.
    name = f"{_FILE}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    imported = _imported(str(path))
    if imported is not None:
        # It was imported as a module: run once more, it would register everything a second time.
        return imported
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {path} is not a Python file")
    make_importable(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        check_imported(list(vars(module).values()), path.parent)
    except Exception as error:  # a user's file runs here: whatever it raises is named
        del sys.modules[name]
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(
            f"{what}: running {_raising_line(path, error)} failed: {type(error).__name__}: {text}"
        ) from error
    return module


def make_importable(folder: Path) -> None:
    """Let the modules in the folder of a user's file be imported by name, where no other module has it."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        _FOLDERS.add(folder)


def check_imported(imported: Iterable[object], folder: Path) -> None:
    """Raise ConfigError where a file of a folder imported the namesake of a module there, from another user's file."""
    for module in map(inspect.getmodule, imported):
        if isinstance(module, ModuleType):
            beside, file = folder / f"{module.__name__}.py", Path(str(vars(module).get("__file__")))
            if file != beside and file.parent in _FOLDERS and beside.is_file():
                raise ConfigError(
                    f"it imports {beside}, but {file} was imported by that name before: rename one of them"
                )


@functools.lru_cache(maxsize=256)
def _resolved(file: str, folder: str) -> Path:
    """Return a file's absolute path relative to a folder (cached: every episode resolves one)."""
    return (folder / Path(file).expanduser()).resolve()


def _imported(file: str) -> ModuleType | None:
    """Return the module that was imported from a file, if any."""
    cached = sys.modules.get(_IMPORTED.get(file, ""))
    if cached is not None and vars(cached).get("__file__") == file:
        return cached
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and vars(module).get("__file__") == file:
            _IMPORTED[file] = name
            return module
    return None


def _raising_line(path: Path, error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def reference_to(target: Any, what: str) -> str:
    """Return a reference from which :func:`load_object` finds a class or function again.

    Objects of the main program are referenced by its file; those of a notebook or interpreter by ``__main__``, which
    only this process resolves.

    Args:
        target: The class or function.
        what: The kind of object ("environment", "agent"), for error messages.

    Raises:
        ConfigError: It has no name, or its name resolves to another object.
    """
    module, name = _name_of(target)
    if module is None or name is None:
        raise ConfigError(f"{what} {target!r} cannot be imported by another process: give a class or function")
    if "<" in name:
        raise ConfigError(
            f"{what} {name} is defined inside a function, where no other process can import it: move it to the top "
            "level of its file"
        )
    owner = module
    if module == "__main__" or module.startswith(_FILE):
        file = vars(sys.modules[module]).get("__file__")
        owner = module if file is None else str(Path(file).resolve())
    reference = f"{owner}:{name}"
    if load_object(reference, what) is not target:
        raise ConfigError(
            f"{what} {reference} refers to another object than the one given: give it a unique name at the top level "
            "of its file"
        )
    return reference


def _name_of(target: Any) -> tuple[str | None, str | None]:
    """Return module and qualified name of a definition, also below decorators."""
    unwrapped = inspect.unwrap(target) if callable(target) else target
    if isinstance(unwrapped, type) or inspect.isroutine(unwrapped):
        return unwrapped.__module__, unwrapped.__qualname__
    return None, None


PLUGIN_KINDS: Final = (
    "environments",
    "environment_families",
    "rewards",
    "agents",
    "sandboxes",
    "row_formats",
    "loggers",
    "inference_engines",
    "weight_transports",
    "run_files",
    "commands",
)
"""Kinds of plug-ins; the group of entry points is ``turnwise.<kind>``."""
CHOSEN: Final = "TURNWISE_EXTENSIONS"
"""Which entry points are loaded: ``all`` (the default), ``none``, or their names separated by commas."""
_SHIPPED: Final = "turnwise.ext.registry"


@functools.lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> Any:  # noqa: ARG001 - what is installed depends on it
    return entry_points()


def installed_entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group in all installed packages, which are read once for a ``sys.path``."""
    selected: EntryPoints = _installed(tuple(sys.path)).select(group=group)
    return selected


def chosen_entry_points() -> list[str]:
    """Return the names in the environment variable that chooses entry points, ``["all"]`` where it is not set."""
    return [name.strip() for name in os.environ.get(CHOSEN, "").split(",") if name.strip()] or ["all"]


def references(kind: str) -> dict[str, str]:
    """Return the references that plug in for a kind, by name: those that ship, then those of installed packages.

    Args:
        kind: One of :data:`PLUGIN_KINDS`.

    Raises:
        ConfigError: Two packages have an entry point of one name.
    """
    shipped = _shipped_references().get(kind, {})
    by_name = dict(shipped)
    if chosen_entry_points() == ["none"]:
        return by_name
    for entry in installed_entry_points(f"turnwise.{kind}"):
        owner = entry.dist.name if entry.dist is not None else "an unknown package"
        if by_name.setdefault(entry.name, entry.value) != entry.value:
            raise ConfigError(
                f"the entry point {entry.name!r} of the group turnwise.{kind} (package {owner}) is taken by "
                f"{by_name[entry.name]}: uninstall one of the two, or leave all out with {CHOSEN}=none"
            )
    return by_name


@functools.cache
def _shipped_references() -> Mapping[str, Mapping[str, str]]:
    if importlib.util.find_spec(_SHIPPED.rpartition(".")[0]) is None:
        return {}
    registry: Mapping[str, Mapping[str, str]] = vars(importlib.import_module(_SHIPPED))["REFERENCES"]
    return registry


MODULES: Final = "TURNWISE_EXTERNAL_MODULES"
"""Names of modules, or paths of files ending in .py, separated by commas."""
GROUP: Final = "turnwise.extensions"
"""The group of entry points."""

_loaded: set[str] = set()
_done: dict[str, str | None] = {}


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import in this context: thousands of modules make no garbage, and looking for some takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_extensions() -> list[str]:
    """Import the extensions not imported yet; return their names, in order. Raises ConfigError."""
    environment = {variable: os.environ.get(variable) for variable in (MODULES, CHOSEN)}
    if environment == _done:
        # Asked before every configuration: what is installed is looked up once.
        return []
    done: list[str] = []
    for entry in _entry_points():
        if _mark_loading(f"{GROUP}:{entry.name}"):
            done.append(entry.name)
            _load_entry_point(entry)
    for name in map(str.strip, os.environ.get(MODULES, "").split(",")):
        if name and _mark_loading(name):
            done.append(name)
            _import_extension(name)
    _done.update(environment)
    return done


def _mark_loading(key: str) -> bool:
    """Mark an extension as loading; False if it was before (a module may load a configuration itself)."""
    fresh = key not in _loaded
    _loaded.add(key)
    return fresh


def _entry_points() -> Iterator[EntryPoint]:
    names = chosen_entry_points()
    by_name = {entry.name: entry for entry in installed_entry_points(GROUP)}
    if names == ["none"]:
        return
    if names == ["all"]:
        names = sorted(by_name)
    for name in names:
        if name not in by_name:
            installed = ", ".join(sorted(by_name)) or "none"
            raise ConfigError(
                f"{CHOSEN} names {name!r}, but no installed package has an entry point of that name in {GROUP} "
                f"(there are: {installed}): install it, or remove the name"
            )
        yield by_name[name]


def _load_entry_point(entry: EntryPoint) -> None:
    owner = entry.dist.name if entry.dist is not None else "an unknown package"
    what = f"the extension {entry.name!r} ({entry.value}, of the package {owner})"
    remedy = f"fix or uninstall {owner}, or leave it out with {CHOSEN}=none"
    try:
        extension = entry.load()
        if callable(extension):
            extension()
    except Exception as error:  # code of others runs here: whatever it raises is named
        _loaded.discard(f"{GROUP}:{entry.name}")
        raise ConfigError(f"{what} cannot be loaded: {_error_text(error)}; {remedy}") from error
    if not callable(extension) and not isinstance(extension, ModuleType):
        raise ConfigError(
            f"{what} is a {type(extension).__name__}: it must name a module, or a function without arguments; {remedy}"
        )


def _import_extension(name: str) -> None:
    remedy = f"fix it, or remove it from {MODULES}"
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
            remedy = f"install its package, put its folder on PYTHONPATH, or remove it from {MODULES}"
        raise ConfigError(f"{MODULES} names {name!r}: {error}; {remedy}") from error
    except Exception as error:  # code of others runs here: whatever it raises is named
        _loaded.discard(name)
        raise ConfigError(f"{MODULES} names {name!r}: importing it failed: {_error_text(error)}; {remedy}") from error


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
