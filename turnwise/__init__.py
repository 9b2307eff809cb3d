"""Turnwise: Gym-style environments and agents, recorded token by token, trained with PPO/GRPO."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnwise.version import __version__ as __version__


def export_lazily(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` of a package: what its stub (``.pyi``) imports, dunder names left out.

    Importing all of it at once would take up to seconds.

    Args:
        package: Its ``__name__``.
        file: Its ``__file__``, beside which the stub is.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = ((alias.name, str(node.module)) for node in imports for alias in node.names)
    home_of = {name: module for name, module in names if not name.startswith("__")}

    def import_attribute(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = vars(sys.modules[package])[name] = getattr(importlib.import_module(home_of[name]), name)
        return value

    return sorted(home_of), import_attribute


__all__, __getattr__ = export_lazily(__name__, __file__)


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
