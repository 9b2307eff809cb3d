"""The shape of the code: sizes, layers, where errors may be caught, and configuration that something reads."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from pydantic import BaseModel

from support.section_reads import unread_fields

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "turnwise"
SIZED = ("turnwise", "benchmarks", "examples", "tests/support")
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_METHODS_OF_A_CLASS = 12
ERRORS_BECOME_DATA_IN = "turnwise/rollout/runner.py"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*folders: str) -> list[Path]:
    """The files of some folders that are the project's (a folder may be missing from a source distribution)."""
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")) if ".cache" not in file.parts]


def too_large(name: str, text: str) -> list[str]:
    """What is too large in a file, each with the file, what it is, its size and the most that is allowed."""
    lines = len(text.splitlines())
    found = [] if lines <= MOST_LINES_OF_A_FILE else [f"{name}: {lines} lines, at most {MOST_LINES_OF_A_FILE}"]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_LINES_OF_A_FUNCTION:
                found.append(f"{name}:{node.lineno}: {node.name}: {length} lines, at most {MOST_LINES_OF_A_FUNCTION}")
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, FUNCTIONS) and is_public_method(each)]
            if len(methods) > MOST_METHODS_OF_A_CLASS:
                counted = f"{len(methods)} public methods, at most {MOST_METHODS_OF_A_CLASS}"
                found.append(f"{name}:{node.lineno}: {node.name}: {counted}")
    return found


def is_public_method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    properties = any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
    return not node.name.startswith("_") and not properties


@pytest.mark.parametrize("folder", SIZED)
def test_no_file_function_or_class_is_too_large(folder: str) -> None:
    files = sources(folder)
    assert files, f"{folder} holds no Python"
    found = [each for file in files for each in too_large(str(file.relative_to(ROOT)), file.read_text())]
    assert not found, "split by moving a whole idea out:\n" + "\n".join(found)


def test_sizes_are_counted_right() -> None:
    long = "class A:\n    @cached\n    async def f(self):\n" + "        x = 1\n" * 60
    assert too_large("a.py", long) == ["a.py:3: f: 61 lines, at most 60"]
    assert too_large("a.py", long.replace("        x = 1\n", "", 1)) == []
    assert too_large("a.py", "x = 1\n" * 401) == ["a.py: 401 lines, at most 400"]
    assert too_large("a.py", "x = 1\n" * 400) == []
    methods = "".join(f"    def m{n}(self): ...\n" for n in range(13))
    assert too_large("a.py", f"class A:\n{methods}") == ["a.py:1: A: 13 public methods, at most 12"]
    assert too_large("a.py", f"class A:\n{methods.replace('m0', '_m0')}") == []


# Layers.


def contracts() -> dict[str, dict[str, list[str]]]:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["type"]: contract for contract in linter["contracts"]}


def test_every_room_stands_in_one_layer() -> None:
    layers = [room.strip() for layer in contracts()["layers"]["layers"] for room in layer.split("|")]
    held = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    rooms = {f"turnwise.{path.stem}" for path in held}
    outside = {"turnwise.__init__", "turnwise.__main__"}  # the lazy public names, and the way into the command line
    assert sorted(layers) == sorted(rooms - outside), "pyproject.toml, [[tool.importlinter.contracts]], layers"


def test_every_module_that_needs_no_torch_is_forbidden_to_import_it() -> None:
    graph = grimp.build_graph("turnwise", include_external_packages=True, exclude_type_checking_imports=True)
    forbidden = contracts()["forbidden"]["source_modules"]
    covered = {each for module in forbidden for each in (module, *graph.find_descendants(module))}
    # Above the rooms without torch, or run by vLLM in a process of its own.
    above = ("turnwise.trainer.", "turnwise.cli.", "turnwise.__main__", "turnwise.inference.vllm_side.")
    own = {module for module in graph.modules if module.startswith("turnwise.") and not module.startswith(above)}
    free = {each for each in own if not graph.find_children(each) and not graph.chain_exists(each, "torch")}
    missing = sorted(free - covered)
    assert not missing, f"add to source_modules of the torch contract in pyproject.toml: {', '.join(missing)}"


# Errors.


def broad_handlers(text: str) -> Iterator[tuple[int, bool, str]]:
    """Every handler of everything: its line, whether it raises in all that it does, and its line's text."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(each is None or (isinstance(each, ast.Name) and each.id in BROAD) for each in caught):
            yield node.lineno, isinstance(node.body[-1], ast.Raise), lines[node.lineno - 1]


BROAD = ("Exception", "BaseException")


def test_everything_is_caught_in_one_place_only() -> None:
    """Elsewhere a handler of everything raises again (as a named error), or says beside it why it is a boundary."""
    for file in sources("turnwise"):
        name = str(file.relative_to(ROOT))
        for line, raises, text in broad_handlers(file.read_text()):
            allowed = name == ERRORS_BECOME_DATA_IN or raises or re.search(r"# noqa: BLE001 - \w+", text)
            assert allowed, f"{name}:{line} catches everything and does not say why: {text.strip()}"


def test_a_broad_handler_is_seen() -> None:
    again = "try:\n    f()\nexcept (OSError, BaseException) as error:\n    raise A from error\n"
    text = f"try:\n    f()\nexcept Exception:\n    pass\n{again}"
    assert [(line, raises) for line, raises, _ in broad_handlers(text)] == [(3, False), (7, True)]
    assert [line for line, *_ in broad_handlers("try:\n    f()\nexcept:\n    pass\n")] == [3]
    assert not list(broad_handlers("try:\n    f()\nexcept ValueError:\n    pass\n"))


# Attributes by name: only of objects that are not ours. What is written here is all of it.
FOREIGN_ATTRIBUTES = {
    "max_position_embeddings",  # a field that not every transformers config has
    "_asdict",  # how a named tuple of the user's is told from a tuple
    *("fully_trusted_filter", "data_filter"),  # which tarfile has from Python 3.11.4 on
    "_base_executable",  # the interpreter that a virtual environment was made from, in CPython
    # What objects of pytest have, of one version or another (envs/swe/guard/plugin.py).
    *("__file__", "__func__", "_excinfo", "get_hookimpls", "wasxfail"),
    *("function", "cls", "module", "pytestmark", "_fixtureinfo", "name2fixturedefs", "__mro__", "__dict__"),
}


def test_no_attribute_of_our_own_is_asked_for_by_its_name() -> None:
    found = set()
    for file in sources("turnwise"):
        for node in ast.walk(ast.parse(file.read_text())):
            by_name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if by_name and node.func.id in ("getattr", "hasattr", "setattr") and isinstance(node.args[1], ast.Constant):
                found.add(node.args[1].value)
    assert found == FOREIGN_ATTRIBUTES, "an own type has attributes: use a protocol, a default or an isinstance"


# Configuration.


def own_fields(section: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name in section.model_fields if name in section.__annotations__)


@pytest.fixture(scope="module")
def sections() -> list[type[BaseModel]]:
    """Every pydantic class of the package."""
    found: list[type[BaseModel]] = []
    for file in sources("turnwise"):
        if "BaseModel" in file.read_text():
            module = importlib.import_module(dotted(file))
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            found += [each for each in classes if issubclass(each, BaseModel) and each.__module__ == module.__name__]
    names = {each.__name__ for each in found}
    assert {"TrainConfig", "SFTConfig", "EvalConfig", "RolloutConfig", "InferenceConfig"} <= names
    assert len(names) == len(found), "two sections have the same name"
    return found


def test_no_config_key_is_there_that_nothing_reads(sections: list[type[BaseModel]]) -> None:
    unread = unread_fields(sources("turnwise"), {each.__name__: own_fields(each) for each in sections})
    assert not unread, f"config keys that nothing reads: {', '.join(unread)}"


def test_every_section_refuses_unknown_keys_and_says_what_each_means(sections: list[type[BaseModel]]) -> None:
    for section in sections:
        name = section.__name__
        if name.startswith("_"):
            continue
        assert section.model_config.get("extra") == "forbid", f"{name} takes keys that it does not know"
        described = set(re.findall(r"^    (\w+): \S", inspect.getdoc(section) or "", re.MULTILINE))
        fields = set(own_fields(section))
        assert described <= fields, f"{name} describes {described - fields}, which it does not have"
        assert fields <= described or len(fields) <= 3, f"{name} does not say what {fields - described} mean"


EXAMPLE = """
class Inner(BaseModel):
    seen: int = 1
    missed: int = 2

class Outer(BaseModel):
    inner: Inner
    others: dict[str, Inner]
    name: str = ""
    kept: int = 3

class Other:
    missed: int
    name: str

class Reader:
    def __init__(self, config: "Outer | None", other: Other) -> None:
        self._config = config or Outer()
        self.name, self.kept = other.name, other.missed

    def read(self, other: Other) -> int:
        own, count = self._config, 3
        for each in own.others.values():
            print(each.seen)
        own = other
        return own.name
"""


def test_a_key_that_nothing_reads_is_found_although_its_name_is_read_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(EXAMPLE)
    found = unread_fields([file], {"Inner": ("seen", "missed"), "Outer": ("inner", "others", "name", "kept")})
    assert found == ["Inner.missed", "Outer.inner", "Outer.name", "Outer.kept"]


# Docstrings.

ROLE = re.compile(r":(class|func|meth|data|mod):`~?([\w.]+)`")


def dotted(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def names_in(tree: ast.Module) -> set[str]:
    """What a file defines, assigns or imports, the members of its classes included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).rpartition(".")[2])
    return found


def references(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What the docstrings of a file refer to, with the role that they give it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ROLE.findall(node.value.value)


def test_what_docstrings_name_is_there() -> None:
    trees = {dotted(file): ast.parse(file.read_text()) for file in sources("turnwise")}
    names = {module: names_in(tree) for module, tree in trees.items()}
    for module, tree in trees.items():
        for role, target in references(tree):
            owner, _, name = target.rpartition(".")
            if role == "mod":
                assert target in trees, f"{module} speaks of the module {target}, which is not there"
                continue
            if owner and not owner.startswith("turnwise."):
                assert owner in names[module], f"{module} speaks of {target}, but knows no {owner}"
                owner = ""
            while owner and owner not in trees:
                owner = owner.rpartition(".")[0]
            assert name in names[owner or module], f"{module} speaks of {target}, which is not there"
    assert sum(len(list(references(tree))) for tree in trees.values()) > 100


def test_a_module_docstring_owns_what_stands_in_its_module() -> None:
    """ "Owns: :func:`f`" is a promise to somebody who looks for f: an import from elsewhere does not keep it."""
    for file in sources("turnwise"):
        tree = ast.parse(file.read_text())
        owned = re.search(r"\bOwns: (.*?)(?:\.\s|\.$|Refuses:)", ast.get_docstring(tree) or "", re.DOTALL)
        for node in [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]:
            tree.body.remove(node)
        for _, target in ROLE.findall(owned.group(1)) if owned else ():
            assert "." in target or target in names_in(tree), f"{dotted(file)} says that it owns {target}; it does not"
