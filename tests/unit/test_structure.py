"""The shape of the code: sizes, imports, where errors may be caught, and configuration that something reads."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from pydantic import BaseModel

from support import structure
from support.config_reads import unread_fields
from support.structure import (
    FUNCTIONS,
    RULES,
    Tree,
    broad_handlers,
    components,
    late_lines,
    longest_chain,
    may_be_small,
    module_of,
    read_tree,
)

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "turnwise"

# What still breaks each rule: at most so many. A rule that is not here has nothing against it.
NOT_YET: dict[str, int] = {}


def sources(*folders: str) -> list[Path]:
    """The files of some folders that are the project's (a folder may be missing from a source distribution)."""
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")) if ".cache" not in file.parts]


@pytest.fixture(scope="module")
def tree() -> Tree:
    # Finalizers that run while Python 3.11 builds a syntax tree (of tasks that other tests left) break it off.
    gc.collect()
    gc.disable()
    try:
        found = read_tree()
    finally:
        gc.enable()
    assert {path.partition("/")[0] for path in found.files} == {"turnwise", "benchmarks", "examples", "tests"}
    return found


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_the_house_holds(tree: Tree, rule: str) -> None:
    """``python tests/support/structure.py`` prints all of it."""
    found = RULES[rule](tree)
    assert len(found) <= NOT_YET.get(rule, 0), f"{rule}:\n" + "\n".join(found)


def test_what_does_not_hold_yet_is_a_rule() -> None:
    assert NOT_YET.keys() <= RULES.keys()


# That each rule counts right.


def broken(rule: str, tree: Tree) -> list[str]:
    """What breaks one rule in a small tree."""
    return RULES[rule](tree)


def files(**texts: str) -> Tree:
    """A tree of files of the package, by their names."""
    return Tree({f"turnwise/{name}.py": text for name, text in texts.items()})


def test_sizes_of_files_are_counted_right() -> None:
    assert broken("files are not too large", files(a="x = 1\n" * 601)) == ["turnwise/a.py: 601 lines, at most 600"]
    assert broken("files are not too large", files(a="x = 1\n" * 600)) == []


def test_sizes_of_functions_are_counted_right() -> None:
    long = "class A:\n    @cached\n    async def f(self):\n" + "        x = 1\n" * 60
    rule = "functions are not too large"
    assert broken(rule, files(a=long)) == ["turnwise/a.py:3: f: 61 lines, at most 60"]
    assert broken(rule, files(a=long.replace("        x = 1\n", "", 1))) == []


def test_methods_of_classes_are_counted_right() -> None:
    methods = "".join(f"    def m{n}(self): ...\n" for n in range(13))
    rule = "classes are not too large"
    assert broken(rule, files(a=f"class A:\n{methods}")) == ["turnwise/a.py:1: A: 13 public methods, at most 12"]
    assert broken(rule, files(a=f"class A:\n{methods.replace('m0', '_m0')}")) == []
    assert broken(rule, files(a="class A:\n    @property\n" + methods)) == []


def test_a_small_file_with_one_importer_is_found() -> None:
    def found(path: str, text: str, *importers: str) -> list[str]:
        imports = {each: {module_of(path)} for each in importers}
        return broken("small files have several importers", Tree({path: text}, imports))

    short = "x = 1\n" * 79
    assert found("turnwise/a/b.py", short, "turnwise.c") == ["turnwise/a/b.py: 79 lines, imported by turnwise.c only"]
    assert found("turnwise/a/b.py", short, "turnwise.c", "turnwise.d") == []
    assert found("turnwise/a/b.py", short) == []
    assert found("turnwise/a/b.py", f"{short}x = 1\n", "turnwise.c") == []


@pytest.mark.parametrize(
    ("path", "text", "may"),
    [
        ("turnwise/a/core.py", "", True),
        ("turnwise/a/__init__.py", "", True),
        ("turnwise/envs/library/lookup.py", "", True),
        ("turnwise/a/inside/program.py", "", True),
        ("turnwise/inference/vllm_side/serve.py", "", True),
        ("turnwise/a/b.py", 'if __name__ == "__main__":\n    main()\n', True),
        ("turnwise/a/b.py", "x = 1\n", False),
        ("turnwise/envs/lookup.py", "", False),
    ],
)
def test_contracts_entry_points_and_what_runs_elsewhere_may_be_small(path: str, text: str, may: bool) -> None:
    assert may_be_small(path, text) == may


def test_files_are_counted_by_folder_and_in_all() -> None:
    def tree(count: int, folder: str) -> Tree:
        return Tree({f"turnwise/{folder}/f{number}.py": "" for number in range(count)})

    assert broken("folders are not too full", tree(15, "a")) == ["turnwise/a/: 15 Python files, at most 14"]
    assert broken("folders are not too full", tree(14, "a")) == []
    outside, whole = structure.MOST_FILES_OUTSIDE_THE_LIBRARY, structure.MOST_FILES
    assert broken("files are not too many", tree(outside, "a")) == []
    assert broken("files are not too many", tree(whole, "envs/library")) == []
    assert broken("files are not too many", tree(outside + 1, "a")) == [
        f"outside turnwise/envs/library/: {outside + 1} files, at most {outside}"
    ]
    assert broken("files are not too many", tree(whole + 1, "envs/library")) == [
        f"turnwise/: {whole + 1} files, at most {whole}"
    ]


def test_lines_are_counted() -> None:
    most = structure.MOST_LINES
    assert broken("lines are not too many", files(a="\n" * (most - 9), b="\n" * 9)) == []
    over = files(a="\n" * (most - 9), b="\n" * 10)
    assert broken("lines are not too many", over) == [f"turnwise/: {most + 1} lines, at most {most}"]


def test_cycles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert sorted(components(imports)) == [["a", "b", "c"], ["d"], ["e"]]
    assert broken("imports have no cycle", Tree(imports=imports)) == [
        "of 3 modules: a > b > c > a",
        "of 3 modules: b > c > a > b",
        "of 3 modules: c > a > b > c",
    ]
    assert broken("imports have no cycle", Tree(imports={**imports, "c": {"d"}})) == []


def test_the_longest_chain_is_found() -> None:
    assert longest_chain({"a": {"b", "d"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"d"}}) == ["a", "b", "c", "d"]
    assert len(longest_chain({"a": {"b"}, "b": {"a", "c"}, "c": set()})) == 3
    chain = {f"m{number}": {f"m{number + 1}"} for number in range(25)} | {"m25": set[str]()}
    assert broken("import chains are not too long", Tree(runtime=chain)) == ["number 26 of 26: m25"]
    del chain["m0"]
    assert broken("import chains are not too long", Tree(runtime=chain)) == []


def test_what_a_function_imports_is_no_part_of_a_chain() -> None:
    assert late_lines("import a\n\ndef f():\n    import b\n\nimport c\n") == {3, 4}


def test_an_import_rule_of_a_module_is_found() -> None:
    def found(*names: str) -> list[str]:
        tree = Tree(
            {"turnwise/a/__init__.py": "", "turnwise/a/b.py": ""}, contracts=[{"name": "R", "layers": list(names)}]
        )
        return broken("import rules name packages", tree)

    assert found("turnwise.a.b") == ["R: turnwise.a.b is no package"]
    assert found("turnwise.a | turnwise.config", "turnwise.types", "torch") == []
    assert found("turnwise.types | turnwise.a.b") == ["R: turnwise.a.b is no package"]


def test_headings_of_docstrings_are_found() -> None:
    text = '"""A.\n\nOwns: b.\n"""\n\ndef f():\n    """C. Refuses: d."""\n\ndef g():\n    """E owns f."""\n'
    assert broken("docstrings have no headings", files(a=text)) == ["turnwise/a.py", "turnwise/a.py: f"]


def test_a_broad_handler_is_seen() -> None:
    again = "try:\n    f()\nexcept (OSError, BaseException) as error:\n    raise A from error\n"
    text = f"try:\n    f()\nexcept Exception:\n    pass\n{again}"
    assert [line for line, _ in broad_handlers(text)] == [3, 7]
    assert [line for line, _ in broad_handlers("try:\n    f()\nexcept:\n    pass\n")] == [3]
    assert not list(broad_handlers("try:\n    f()\nexcept ValueError:\n    pass\n"))


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("", False),
        ("  # noqa: BLE001", False),
        ("  # noqa: BLE001 - a program of the user's", True),
        ("  # a program of the user's", True),
    ],
)
def test_a_broad_handler_says_why(comment: str, said: bool) -> None:
    text = f"try:\n    f()\nexcept Exception:{comment}\n    raise\n"
    assert (broken("broad handlers say why", files(a=text)) == []) == said


# Layers.


def test_every_room_stands_in_one_layer(tree: Tree) -> None:
    contracts = {contract["type"]: contract for contract in tree.contracts}
    layers = [room.strip() for layer in contracts["layers"]["layers"] for room in layer.split("|")]
    held = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    rooms = {f"turnwise.{path.stem}" for path in held}
    outside = {"turnwise.__init__", "turnwise.__main__"}  # the lazy public names, and the way into the command line
    assert sorted(layers) == sorted(rooms - outside), "pyproject.toml, [[tool.importlinter.contracts]], layers"


def test_every_package_that_needs_no_torch_is_forbidden_to_import_it(tree: Tree) -> None:
    graph = grimp.build_graph("turnwise", include_external_packages=True, exclude_type_checking_imports=True)
    forbidden = {contract["type"]: contract for contract in tree.contracts}["forbidden"]["source_modules"]
    covered = {each for module in forbidden for each in (module, *graph.find_descendants(module))}
    # Above the rooms without torch, or run by vLLM or SGLang in a process of its own.
    elsewhere = ("turnwise.engine.vllm_side", "turnwise.engine.sglang_side")
    above = ("turnwise.trainer", "turnwise.cli", "turnwise.__main__", *elsewhere)
    own = {module for module in graph.modules if module.startswith("turnwise.") and not module.startswith(above)}
    packages = {each for each in own if graph.find_children(each) or each.count(".") == 1}
    needing = graph.find_downstream_modules("torch")
    free = {each for each in packages if not needing & {each, *graph.find_descendants(each)}}
    missing = sorted(free - covered)
    assert not missing, f"add to source_modules of the torch contract in pyproject.toml: {', '.join(missing)}"


# Attributes by name: only of objects that are not ours. What is written here is all of it.
FOREIGN_ATTRIBUTES = {
    "max_position_embeddings",  # a field that not every transformers config has
    "deepstack_features",  # a part of what some of transformers' vision towers return
    "_asdict",  # how a named tuple of the user's is told from a tuple
    *("fully_trusted_filter", "data_filter"),  # which tarfile has from Python 3.11.4 on
    "lm_head",  # which not every model of vLLM has
    "_base_executable",  # the interpreter that a virtual environment was made from, in CPython
    # What objects of pytest have, of one version or another (envs/library/swe/guard/plugin.py).
    *("__file__", "__func__", "_excinfo", "get_hookimpls", "wasxfail"),
    *("function", "cls", "module", "pytestmark", "_fixtureinfo", "name2fixturedefs", "__mro__", "__dict__"),
    "__module__",
    *("tolist", "size"),  # what scalars of numpy have, which foreign environments answer with
    *(
        "score",
        "fork",
        "close",
        "endless",
    ),  # what drivers of foreign frameworks may leave out: they are written without Turnwise
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
    return module_of(file.relative_to(ROOT).as_posix())


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
