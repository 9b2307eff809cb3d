"""transformers, imported without the compiler and the distributed tensors that a server of one model never uses.

Modules of transformers import ``torch._dynamo`` for its decorators and ``torch.distributed.tensor`` where torch has it:
more than half of what their import costs. A server compiles nothing and runs on one device, so its process imports them
as if torch had neither. For processes of our own only: code of others may want both.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

_LIBRARY = "transformers"
_COMPILER = "torch._dynamo"
_TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
_MODULES = (
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.masking_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
)


@contextlib.contextmanager
def lean_transformers() -> Iterator[None]:
    """Import what models of transformers stand on, and load a model meanwhile; afterwards the compiler is there again.

    Where transformers or the compiler is imported already, nothing is done.

    Raises:
        ImportError: transformers is not installed.
    """
    if _MODULES[0] in sys.modules or _COMPILER in sys.modules:
        yield
        return
    utils = _import_utils()
    # Which names stand in which of its 2,000 files is found out three times by reading all of them.
    utils.create_import_structure_from_path = _by_folder(utils.create_import_structure_from_path)
    with _no_distributed():
        # It remembers its answer, so that all of transformers goes by it from here on.
        utils.is_torch_distributed_available()
    _pretend()
    try:
        for name in _MODULES:
            importlib.import_module(name)
        yield
    finally:
        _admit()


@contextlib.contextmanager
def _no_distributed() -> Iterator[None]:
    there = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = there


def _import_utils() -> Any:
    """Import what transformers finds its names with before itself, as its own first lines do."""
    spec = importlib.util.find_spec(_LIBRARY)
    if _LIBRARY not in sys.modules and spec is not None:
        begun = ModuleType(_LIBRARY)
        begun.__spec__, begun.__file__ = spec, spec.origin
        begun.__path__ = list(spec.submodule_search_locations or [])
        begun.__version__ = importlib.metadata.version(_LIBRARY)  # type: ignore[attr-defined]
        sys.modules[_LIBRARY] = begun
        try:
            importlib.import_module(f"{_LIBRARY}.utils.import_utils")
        finally:
            del sys.modules[_LIBRARY]
    return importlib.import_module(f"{_LIBRARY}.utils.import_utils")


def _by_folder(find: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """Return a function that looks into a folder once; a file stands for the folder that it is in."""
    found: dict[str, dict[Any, Any]] = {}

    def remembered(path: Any) -> dict[Any, Any]:
        folder = os.fspath(path)
        folder = os.path.dirname(folder) if os.path.isfile(folder) else folder
        if folder not in found:
            found[folder] = find(path)
        return copy.deepcopy(found[folder])

    return remembered


class _NoCompiler(ModuleType):
    """What stands in the place of ``torch._dynamo`` while transformers is imported."""


def _pretend() -> None:
    """Put a compiler in place whose decorators change nothing."""
    compiler, tracing = _NoCompiler(_COMPILER), ModuleType(_TRACING)
    for name in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(compiler, name, _unchanged)
    compiler.__path__ = []
    tracing.TransformGetItemToIndex = _index_mode  # type: ignore[attr-defined]
    sys.modules |= {_COMPILER: compiler, _TRACING: tracing}
    torch._dynamo = compiler


def _admit() -> None:
    """Take it away again: torch imports its own when it is asked for."""
    if isinstance(sys.modules.get(_COMPILER), _NoCompiler):
        for name in (_COMPILER, _TRACING):
            del sys.modules[name]
        del torch._dynamo


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, used with arguments or without."""
    return _unchanged if function is None else function


def _index_mode() -> Any:
    """Make what masks are computed in, for the few models that compute one from a function."""
    _admit()
    return importlib.import_module(_TRACING).TransformGetItemToIndex()
