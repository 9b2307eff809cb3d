"""What benchmarks and examples import is there: most of them run in no test."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.errors import MissingExtraError

ROOT = Path(__file__).parents[3]
FOLDERS = ("benchmarks", "examples")
# What the files put on the path beside their own folder.
SHARED = (
    "benchmarks",
    "tests",
    "examples/small_model",
    "examples/lookup",
    "examples/black_boxes",
    "examples/sql/src",
    "examples/tool_calls/src",
    "examples/published/search",
    "examples/long_task",
)
Name = tuple[int, str, str | None]  # the line, the module, and what is taken from it


def files() -> list[str]:
    paths = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [str(file.relative_to(ROOT)) for file in paths if ".cache" not in file.parts]


def imported(text: str) -> Iterator[Name]:
    """Every absolute import of a file, those inside of functions too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def lacks(module: str, name: str | None) -> bool:
    """Whether the package has no such module, or the module no such name.

    Raises:
        ModuleNotFoundError: The module is there, and needs a package that is not installed.
    """
    try:
        imported_module = importlib.import_module(module)
        if name is None or hasattr(imported_module, name):
            return False
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "turnwise":
            raise
        return True
    return False


def neighbour(file: Path, module: str) -> Path | None:
    """The file of a module that is no package's, as the files that import it find it."""
    parts = Path(*module.split("."))
    candidates = (folder / parts.with_suffix(".py") for folder in (file.parent, *(ROOT / shared for shared in SHARED)))
    return next((candidate for candidate in candidates if candidate.exists()), None)


def at_top(text: str) -> set[str]:
    """What a file defines, assigns or imports outside of functions and classes."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
                continue
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name)
            waiting.append(node)
    return names


@pytest.mark.parametrize("name", files())
def test_imported_names_exist(name: str) -> None:
    file, missing, needed = ROOT / name, [], set()
    for line, module, name_ in imported(file.read_text()):
        problem = f"{name}:{line}: {module}{'' if name_ is None else ' has no ' + name_}"
        if module.partition(".")[0] == "turnwise":
            try:
                missing += [problem] if lacks(module, name_) else []
            except ModuleNotFoundError as error:
                needed.add(f"{module} needs {error.name}")
            except MissingExtraError as error:
                needed.add(str(error))
        elif module.partition(".")[0] not in sys.stdlib_module_names:
            other = neighbour(file, module)
            missing += [problem] if other is not None and name_ not in {None, *at_top(other.read_text())} else []
    assert not missing, "\n".join(missing)
    if needed:
        pytest.skip(f"{', '.join(sorted(needed))}, which is not installed")


def test_missing_imports_are_found(tmp_path: Path) -> None:
    assert list(imported("import a.b\ndef f():\n    from a import c, d\n    from . import e\n")) == [
        (1, "a.b", None), (3, "a", "c"), (3, "a", "d"),
    ]  # fmt: skip
    assert not lacks("turnwise", "Env")
    assert not lacks("turnwise.envs", "core")
    assert lacks("turnwise.envs", "Nothing")
    assert lacks("turnwise.nowhere", "Env")
    assert lacks("turnwise.envs.nowhere", None)
    (tmp_path / "other.py").write_text("if 1:\n    from x import y as z\nA: int = 1\nasync def f():\n    inside = 1\n")
    assert neighbour(tmp_path / "one.py", "nobody") is None
    other = neighbour(tmp_path / "one.py", "other")
    assert other is not None
    assert at_top(other.read_text()) == {"z", "A", "f"}
