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

from support.config_reads import unread_fields
from support.naming import nodes, parsed, wording
from support.structure import (
    FUNCTIONS,
    LONGEST_CHAIN,
    MOST_LINES,
    RULES,
    Figure,
    Tree,
    broad_handlers,
    components,
    figures,
    late_lines,
    leaf_keys,
    longest_chain,
    may_be_small,
    module_of,
    read_tree,
    room_of,
)

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "turnwise"


@pytest.fixture(scope="module")
def tree() -> Tree:
    # Finalizers that run while Python 3.11 builds a syntax tree (of tasks that other tests left) break it off.
    gc.collect()
    gc.disable()
    try:
        tree = read_tree()
        for text in (*tree.files.values(), *tree.tests.values()):
            nodes(text)
    finally:
        # The nodes are kept: no later collection looks at them.
        gc.freeze()
        gc.enable()
    assert {path.partition("/")[0] for path in tree.files} == {"turnwise", "benchmarks", "examples", "tests"}
    return tree


@pytest.mark.parametrize("rule", RULES)
def test_rule_of_the_house_holds(tree: Tree, rule: str) -> None:
    """``python tests/house.py`` prints all of it."""
    offenders = list(RULES[rule](tree))
    assert not offenders, f"{rule}:\n" + "\n".join(offenders)


def test_figures_of_the_house_are_within_their_limits(tree: Tree) -> None:
    for name, figure in figures(tree).items():
        problem = f"{name}: {figure.count}, at most {figure.limit}:\n"
        assert figure.count <= figure.limit, problem + "\n".join(figure.detail)


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


def test_small_file_with_one_importer_is_reported() -> None:
    def offenders(path: str, text: str, *importers: str) -> list[str]:
        imports = {importer: {module_of(path)} for importer in importers}
        return broken("small files have several importers", Tree({path: text}, imports))

    short = "x = 1\n" * 79
    assert offenders("turnwise/a/b.py", short, "turnwise.c") == [
        "turnwise/a/b.py: 79 lines, imported by turnwise.c only"
    ]
    assert offenders("turnwise/a/b.py", short, "turnwise.c", "turnwise.d") == []
    assert offenders("turnwise/a/b.py", short) == []
    assert offenders("turnwise/a/b.py", f"{short}x = 1\n", "turnwise.c") == []


@pytest.mark.parametrize(
    ("path", "text", "may"),
    [
        ("turnwise/a/core.py", "", True),
        ("turnwise/a/__init__.py", "", True),
        ("turnwise/ext/environments/calculator.py", "", True),
        ("turnwise/a/inside/program.py", "", True),
        ("turnwise/inference/vllm_side/serve.py", "", True),
        ("turnwise/a/b.py", 'if __name__ == "__main__":\n    main()\n', True),
        ("turnwise/a/b.py", "x = 1\n", False),
        ("turnwise/envs/lookup.py", "", False),
    ],
)
def test_contracts_entry_points_and_files_of_other_processes_may_be_small(path: str, text: str, may: bool) -> None:
    assert may_be_small(path, text) == may


def test_files_are_counted_by_folder() -> None:
    def folder(count: int) -> Tree:
        return Tree({f"turnwise/a/f{number}.py": "" for number in range(count)})

    assert broken("folders are not too full", folder(15)) == ["turnwise/a/: 15 Python files, at most 14"]
    assert broken("folders are not too full", folder(14)) == []


def test_lines_of_the_core_and_of_ext_are_counted_apart() -> None:
    counted = figures(Tree({"turnwise/a/b.py": "\n" * 5, "turnwise/c.py": "\n" * 2, "turnwise/ext/a/b.py": "\n" * 3}))
    assert counted["lines of the core"] == Figure(7, MOST_LINES["the core"])
    assert counted["lines of ext"] == Figure(3, MOST_LINES["ext"])


def test_vague_names_are_counted_by_room() -> None:
    text = "found = 1\n" + "".join(f"row_{number} = 1\n" for number in range(199)) + "def f(_each): ...\n"
    counted = figures(Tree({"turnwise/a/b/c.py": text, "turnwise/a/d.py": "def g(row, *, token=1): ...\n"}))
    assert counted["vague names in a"] == Figure(2, 3, ["2 in turnwise/a/b/c.py", "0 in turnwise/a/d.py"])
    assert counted["vague names in the package"].limit == 1


def test_phrases_are_counted_in_comments_and_texts() -> None:
    text = 'x = 1  # the file goes on\n"""What somebody is told."""\n'
    assert wording(text).phrases == ((1, "goes on"), (2, "somebody"), (2, "is told"))
    assert figures(Tree({"turnwise/a.py": text}))["phrases in the package"].count == 3


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("turnwise/a.py", "turnwise"),
        ("turnwise/a/b.py", "a"),
        ("turnwise/a/b/c.py", "a"),
        ("turnwise/ext/registry.py", "ext"),
        ("turnwise/ext/a/b.py", "ext/a"),
        ("turnwise/ext/a/b/c.py", "ext/a"),
    ],
)
def test_room_of_a_file(path: str, room: str) -> None:
    assert room_of(path) == room


def test_leaf_keys_of_sections_in_lists_and_unions_count_once() -> None:
    class Leaf(BaseModel):
        a: int
        b: list[str]

    class Section(BaseModel):
        name: str
        leaf: Leaf | None
        leaves: dict[str, list[Leaf]]

    assert list(leaf_keys(Section)) == ["name", "leaf.a", "leaf.b", "leaves.a", "leaves.b"]


def test_folders_that_import_each_other_are_found() -> None:
    imports = {
        "turnwise.a.b.c": {"turnwise.a.d.e", "turnwise.a.f"},
        "turnwise.a.d.g": {"turnwise.a.b.h"},
        "turnwise.a.f": {"turnwise.a.b.c"},  # a file of the room itself
    }
    rule = "folders of a room import each other one way"
    assert broken(rule, Tree(runtime=imports)) == ["a: b and d import each other"]
    del imports["turnwise.a.d.g"]
    assert broken(rule, Tree(runtime=imports)) == []


@pytest.mark.parametrize(
    ("text", "alias"),
    [
        ("from turnwise import b as c\n", "turnwise.b as c"),
        ("import turnwise.b as c\n", "turnwise.b as c"),
        ("import json as codec\n", "json as codec"),
        ("from json import loads as parse\n", "json.loads as parse"),
        ("import numpy as np\nfrom turnwise import b\n", None),
        ("from json import loads as parse\n\ndef loads(): ...\n", None),
        ("from inspect_ai import eval as evaluate\n", None),
    ],
)
def test_aliases_of_imports_are_found(text: str, alias: str | None) -> None:
    expected = [] if alias is None else [f"turnwise/a.py: {alias}"]
    assert broken("imports have no alias", files(a=text, b="")) == expected


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
    chain = {f"m{number}": {f"m{number + 1}"} for number in range(20)} | {"m20": set[str]()}
    figure = figures(Tree(runtime=chain))["modules in the longest import chain"]
    assert (figure.count, figure.limit, figure.detail[0]) == (21, LONGEST_CHAIN, "m0")


def test_imports_inside_functions_are_no_part_of_a_chain() -> None:
    assert late_lines("import a\n\ndef f():\n    import b\n\nimport c\n") == {3, 4}


def test_an_import_rule_of_a_module_is_found() -> None:
    def offenders(*names: str) -> list[str]:
        tree = Tree(
            {"turnwise/a/__init__.py": "", "turnwise/a/b.py": ""}, contracts=[{"name": "R", "layers": list(names)}]
        )
        return broken("import rules name packages", tree)

    assert offenders("turnwise.a.b") == ["R: turnwise.a.b is no package"]
    assert offenders("turnwise.a | turnwise.config", "turnwise.types", "torch") == []
    assert offenders("turnwise.types | turnwise.a.b") == ["R: turnwise.a.b is no package"]


def test_headings_of_docstrings_are_found() -> None:
    text = '"""A.\n\nOwns: b.\n"""\n\ndef f():\n    """C. Refuses: d."""\n\ndef g():\n    """E owns f."""\n'
    assert broken("docstrings have no headings", files(a=text)) == ["turnwise/a.py", "turnwise/a.py: f"]


def test_a_broad_handler_is_seen() -> None:
    raising = "try:\n    f()\nexcept (OSError, BaseException) as error:\n    raise A from error\n"
    text = f"try:\n    f()\nexcept Exception:\n    pass\n{raising}"
    assert [line for line, _ in broad_handlers(text)] == [3, 7]
    assert [line for line, _ in broad_handlers("try:\n    f()\nexcept:\n    pass\n")] == [3]
    assert not list(broad_handlers("try:\n    f()\nexcept ValueError:\n    pass\n"))


@pytest.mark.parametrize(
    ("comment", "explained"),
    [
        ("", False),
        ("  # noqa: BLE001", False),
        ("  # noqa: BLE001 - a program of the user's", True),
        ("  # a program of the user's", True),
    ],
)
def test_a_broad_handler_says_why(comment: str, explained: bool) -> None:
    text = f"try:\n    f()\nexcept Exception:{comment}\n    raise\n"
    assert (broken("broad handlers say why", files(a=text)) == []) == explained


# Layers.


def test_every_room_stands_in_one_layer(tree: Tree) -> None:
    contracts = {contract["type"]: contract for contract in tree.contracts}
    layers = [room.strip() for layer in contracts["layers"]["layers"] for room in layer.split("|")]
    paths = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    rooms = {f"turnwise.{path.stem}" for path in paths}
    outside = {"turnwise.__init__", "turnwise.__main__"}  # the lazy public names, and the way into the command line
    assert sorted(layers) == sorted(rooms - outside), "pyproject.toml, [[tool.importlinter.contracts]], layers"


def test_packages_without_torch_are_under_the_torch_contract(tree: Tree) -> None:
    graph = grimp.build_graph("turnwise", include_external_packages=True, exclude_type_checking_imports=True)
    forbidden = {contract["type"]: contract for contract in tree.contracts}["forbidden"]["source_modules"]
    covered = {covering for module in forbidden for covering in (module, *graph.find_descendants(module))}
    # Above the rooms without torch, or run by vLLM in a process of its own.
    above = ("turnwise.trainer", "turnwise.cli", "turnwise.__main__", "turnwise.engine.vllm_side")
    below = {module for module in graph.modules if module.startswith("turnwise.") and not module.startswith(above)}
    packages = {module for module in below if graph.find_children(module) or module.count(".") == 1}
    needing = graph.find_downstream_modules("torch")
    free = {package for package in packages if not needing & {package, *graph.find_descendants(package)}}
    missing = sorted(free - covered)
    assert not missing, f"add to source_modules of the torch contract in pyproject.toml: {', '.join(missing)}"


# Attributes by name: only of objects that are not ours. What is written here is all of it.
FOREIGN_ATTRIBUTES = {
    "max_position_embeddings",  # a field that not every transformers config has
    "deepstack_features",  # a part of what some of transformers' vision towers return
    *("gate_up_proj", "__name__"),  # experts of transformers' mixtures, and functions of torch
    "_asdict",  # how a named tuple of the user's is told from a tuple
    *("fully_trusted_filter", "data_filter"),  # which tarfile has from Python 3.11.4 on
    *("lm_head", "quant_method", "moe_kernel"),  # which not every model and layer of vLLM has
    "_base_executable",  # the interpreter that a virtual environment was made from, in CPython
    "is_transposed",  # what transformers says of experts whose matrices are [in, out] (engine/lora.py)
    # What objects of pytest have, of one version or another (ext/environments/swe/guard/plugin.py).
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


def test_no_attribute_of_our_own_is_asked_for_by_its_name(tree: Tree) -> None:
    attributes = set()
    for _, text in tree.package():
        for node in nodes(text):
            by_name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if by_name and node.func.id in ("getattr", "hasattr", "setattr") and isinstance(node.args[1], ast.Constant):
                attributes.add(node.args[1].value)
    assert attributes == FOREIGN_ATTRIBUTES, "an own type has attributes: use a protocol, a default or an isinstance"


# Configuration.


def own_fields(section: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name in section.model_fields if name in vars(section).get("__annotations__", ()))


@pytest.fixture(scope="module")
def sections(tree: Tree) -> list[type[BaseModel]]:
    """Every pydantic class of the package."""
    modules = [module_of(path) for path, text in tree.package() if "BaseModel" in text or "(Section)" in text]
    sections = [
        cls
        for module in modules
        for cls in vars(importlib.import_module(module)).values()
        if isinstance(cls, type) and issubclass(cls, BaseModel) and cls.__module__ == module
    ]
    names = {section.__name__ for section in sections}
    assert {"TrainConfig", "SFTConfig", "EvalConfig", "RolloutConfig", "InferenceConfig"} <= names
    assert len(names) == len(sections), "two sections have the same name"
    return sections


def test_no_config_key_is_there_that_nothing_reads(tree: Tree, sections: list[type[BaseModel]]) -> None:
    fields = {section.__name__: own_fields(section) for section in sections}
    unread = unread_fields([parsed(text) for _, text in tree.package()], fields)
    assert not unread, f"config keys that nothing reads: {', '.join(unread)}"


def test_every_section_refuses_unknown_keys_and_describes_its_keys(sections: list[type[BaseModel]]) -> None:
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


def test_a_key_that_nothing_reads_is_found_although_its_name_is_read_elsewhere() -> None:
    unread = unread_fields(
        [ast.parse(EXAMPLE)], {"Inner": ("seen", "missed"), "Outer": ("inner", "others", "name", "kept")}
    )
    assert unread == ["Inner.missed", "Outer.inner", "Outer.name", "Outer.kept"]


# Docstrings.

ROLE = re.compile(r":(class|func|meth|data|mod):`~?([\w.]+)`")


def names_in(text: str) -> set[str]:
    """What a file defines, assigns or imports, the members of its classes included."""
    names: set[str] = set()
    for node in nodes(text):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).rpartition(".")[2])
    return names


def references(text: str) -> Iterator[tuple[str, str]]:
    """What the docstrings of a file refer to, with the role that they give it."""
    for node in nodes(text):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ROLE.findall(node.value.value)


def test_names_in_docstrings_exist(tree: Tree) -> None:
    texts = {module_of(path): text for path, text in tree.package()}
    names = {module: names_in(text) for module, text in texts.items()}
    for module, text in texts.items():
        for role, target in references(text):
            owner, _, name = target.rpartition(".")
            if role == "mod":
                assert target in texts, f"{module} speaks of the module {target}, which is not there"
                continue
            if owner and not owner.startswith("turnwise."):
                assert owner in names[module], f"{module} speaks of {target}, but knows no {owner}"
                owner = ""
            while owner and owner not in texts:
                owner = owner.rpartition(".")[0]
            assert name in names[owner or module], f"{module} speaks of {target}, which is not there"
    assert sum(len(list(references(text))) for text in texts.values()) > 100
