"""Turnwise: Gym-style environments and agents, recorded token by token, trained with PPO/GRPO."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

from turnwise.version import __version__ as __version__

# The stub names each public name once, for type checkers and for what follows: importing them all would take seconds.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOME_OF = {
    alias.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom) and node.module != "turnwise.version"
    for alias in node.names
}
__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - from the stub


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _GymnasiumIds:
    """Register ``turnwise/<name>-v0`` when Gymnasium is imported after this package.

    ``gymnasium.register_envs(module)`` relies on ids that importing the module registered. Importing Gymnasium here
    would dominate the import time, so an import finder waits for it and then removes itself.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find Gymnasium's spec and register the ids after its module was executed."""
        if name != "gymnasium":
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found_spec for found_spec in specs if found_spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            del vars(loader)["exec_module"]
            sys.meta_path.remove(self)
            execute(module)
            _register_gymnasium_ids()

        vars(loader)["exec_module"] = execute_and_register
        return spec


def _register_gymnasium_ids() -> None:
    importlib.import_module("turnwise.envs.registration").register_with_gymnasium()


if "gymnasium" in sys.modules:
    _register_gymnasium_ids()
else:
    sys.meta_path.insert(0, _GymnasiumIds())
