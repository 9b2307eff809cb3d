"""Paths and dotted names in the documentation are there, and docs/concepts.md shows the rooms as the linter knows them.

Names are looked up in the source, without importing it: ``turnwise.rollout.core.Group`` is the file
``turnwise/rollout/core.py`` and something that stands at its top level.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.doc_pages import DOCS, ROOT, links, section

# What was is told in CHANGELOG.md.
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
FOLDERS = ("turnwise", "tests", "examples", "benchmarks", "docs", ".ci")
PLACEHOLDERS = {"a.py", "b.py", "file.py", "my_hooks.py", "main.py", "env.py"}
# Files that are none of the repository's: of a user, of a run, of Python.
ELSEWHERE = re.compile(r"path/|runs/|my_|examples/NAME/|sitecustomize\.py$|chat_template\.jinja$")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w./<-])([\w.-]+(?:/[\w.-]+)*\.(?:py|jinja))\b")
FOLDER = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})(?:/[\w.-]+)*/)(?![\w{{<*])")
# What stands behind "entry-points." is a group of entry points.
DOTTED = re.compile(r"(?<![\w/.-])(?<!entry-points\.\")turnwise((?:\.[A-Za-z_]\w*)+)(?::([A-Za-z_]\w*))?(?!/|\w*/)")
IMPORTED = re.compile(r"^ *from (turnwise[\w.]*) import (?:\(([^)]*)\)|([^\n(]*))", re.MULTILINE)


@functools.cache
def files() -> tuple[str, ...]:
    paths = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()]
    return tuple("/" + path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts)


def missing_paths(text: str) -> list[str]:
    """The files and folders that a page names in code or links to, and that are not in the repository."""
    missing = []
    for code in (*CODE.findall(text), *(link.removeprefix("../") for link in links(text))):
        for path in FILE.findall(code):
            if path in PLACEHOLDERS or ELSEWHERE.match(path) or f"/{path}" in files():
                continue
            if path.partition("/")[0] in FOLDERS or not any(file.endswith(f"/{path}") for file in files()):
                missing.append(path)
        missing += [folder for folder in FOLDER.findall(code) if not (ROOT / folder).is_dir()]
    return missing


@functools.cache
def top_level(file: Path) -> dict[str, ast.AST]:
    """What stands at the top level of a module, by name; names of the package include those that it loads lazily."""
    stub = file.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else file).read_text(encoding="utf-8"))
    definitions: dict[str, ast.AST] = {}
    for node in ast.walk(tree) if file.name == "__init__.py" else tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            definitions |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return definitions


def is_there(parts: list[str]) -> bool:
    """Whether ``turnwise`` and these parts are a module, or something in one."""
    folder, number = ROOT / "turnwise", 0
    while number < len(parts) and (folder / parts[number]).is_dir():
        folder, number = folder / parts[number], number + 1
    file = folder / "__init__.py"
    if number < len(parts) and (folder / f"{parts[number]}.py").is_file():
        file, number = folder / f"{parts[number]}.py", number + 1
    rest = parts[number:]
    if not rest:
        return True
    node = top_level(file).get(rest[0])
    if node is None or len(rest) == 1 or not isinstance(node, ast.ClassDef):
        return node is not None
    # An inherited member is found by running the page, not here.
    return bool(node.bases) or rest[1] in {name for statement in node.body for name in names_of(statement)}


def names_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def missing_names(text: str) -> list[str]:
    """The dotted names of a page, in code or not, that the package does not have."""
    missing = []
    for match in DOTTED.finditer(text):
        parts = [*match[1].strip(".").split("."), *([match[2]] if match[2] else [])]
        if not is_there(parts):
            missing.append(match[0])
    for module, several, one in IMPORTED.findall(text):
        names = [imported.partition(" as ")[0].strip() for imported in re.sub("#.*", "", several or one).split(",")]
        parts = module.split(".")[1:]
        missing += [f"{module}.{name}" for name in names if name and not is_there([*parts, name])]
    return missing


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_paths_and_dotted_names_are_there(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert missing_paths(text) == []
    assert missing_names(text) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`turnwise/types.py`, `types.py`, `rollout/core.py`, `turnwise/rollout/`", []),
        ("`turnwise/rollout/nowhere.py`", ["turnwise/rollout/nowhere.py"]),
        ("`core/types.py`", ["core/types.py"]),
        ("`turnwise/nowhere/`", ["turnwise/nowhere/"]),
        ("[it](../turnwise/nowhere.py)", ["turnwise/nowhere.py"]),
        ("`path/to/file.py:Class`, `a.py`", []),
    ],
)
def test_a_path_that_is_not_there_is_found(text: str, missing: list[str]) -> None:
    assert missing_paths(text) == missing


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("turnwise.Trainer, `turnwise.rollout.core`, turnwise.types:Message", []),
        ("turnwise.types.StopReason.COMPLETED", []),
        ('[project.entry-points."turnwise.group"]', []),
        ("`turnwise.Trainr`", ["turnwise.Trainr"]),
        ("`turnwise.inference.session`", ["turnwise.inference.session"]),
        ("turnwise.envs.basic.lookup:tusks?n=1", ["turnwise.envs.basic.lookup:tusks"]),
        ("from turnwise.types import Message, Massage", ["turnwise.types.Massage"]),
        ("from turnwise.types import (\n    Message as M,  # it\n    Massage,\n)", ["turnwise.types.Massage"]),
    ],
)
def test_a_name_that_is_not_there_is_found(text: str, missing: list[str]) -> None:
    assert missing_names(text) == missing


def test_the_rooms_are_those_of_the_linter() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    [layers] = [contract["layers"] for contract in tool["importlinter"]["contracts"] if contract["type"] == "layers"]
    level = {name.strip().removeprefix("turnwise."): at for at, layer in enumerate(layers) for name in layer.split("|")}
    rooms = {name: at for name, at in level.items() if (ROOT / "turnwise" / name).is_dir()}
    text = section("concepts.md", "The rooms")
    diagram = [
        name for name in re.findall(r"(?:^ |  )([a-z]+)(?=:|  )", text.split("```")[1], re.MULTILINE) if name in rooms
    ]
    assert sorted(diagram) == sorted(rooms)
    assert [rooms[name] for name in diagram] == sorted(rooms.values())
    listed = re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(rooms)
    assert [rooms[name] for name in listed] == sorted(rooms.values(), reverse=True)


def test_table_names_where_things_are_added() -> None:
    rows = re.findall(
        r"^\| an? (.*?) \|(.*?)\|(.*?)\|(.*)\|$", section("concepts.md", "Where to add what"), re.MULTILINE
    )
    doors = {"chat format", "loss", "sandbox backend", "gateway dialect", "weight transport", "environment"}
    assert doors <= {row[0] for row in rows}
    for what, _, named, _ in rows:
        for file in re.findall(r" in `([\w/.]+\.py)`", named):
            text = (ROOT / file).read_text(encoding="utf-8")
            names = [name.rpartition(".")[2] for name in CODE.findall(named) if "/" not in name]
            assert [
                name for name in names if not re.search(rf"^(async def |def | +async def )?{name}\b", text, re.M)
            ] == [], what
