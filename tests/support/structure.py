"""The rules that the shape of the code keeps: sizes, folders, imports, docstrings and broad handlers.

Each rule is a function from a :class:`Tree` to what breaks it; ``python tests/support/structure.py [RULE]...`` prints
that.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

import grimp

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = "turnwise"
SIZED: Final = (PACKAGE, "benchmarks", "examples", "tests/support")

MOST_LINES_OF_A_FILE: Final = 600
MOST_LINES_OF_A_FUNCTION: Final = 60
MOST_METHODS_OF_A_CLASS: Final = 12
LEAST_LINES_OF_A_FILE: Final = 80
MOST_FILES_OF_A_FOLDER: Final = 14
MOST_FILES: Final = 529
MOST_FILES_OUTSIDE_THE_LIBRARY: Final = 457
MOST_LINES: Final = 122_900
LONGEST_CHAIN: Final = 25

LIBRARY: Final = f"{PACKAGE}/envs/library/"
"""The environments that ship: each may be as small as it is."""
RUN_ELSEWHERE: Final = ("inside", "boot", "guard", "vllm_side", "sglang_side", "shipped")
"""Folders of code that runs in a sandbox or in vLLM's Python, apart from the rest of the package."""

FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED: Final = (*FUNCTIONS, ast.ClassDef, ast.Module)
BROAD: Final = ("Exception", "BaseException")

Imports = Mapping[str, Set[str]]
"""The modules that each module imports, both by their dotted names."""


@dataclass(frozen=True)
class Tree:
    """What the rules look at.

    Attributes:
        files: The text of each file by its path below the root.
        imports: What modules of the package import of it, inside functions and for type checking included.
        runtime: The same without these: what is imported when a module is.
        contracts: The contracts of import-linter.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    imports: Imports = field(default_factory=dict)
    runtime: Imports = field(default_factory=dict)
    contracts: Sequence[Mapping[str, Any]] = ()

    def package(self) -> Iterator[tuple[str, str]]:
        """Yield the files of the package, with their texts."""
        return ((path, text) for path, text in self.files.items() if path.startswith(f"{PACKAGE}/"))


Rule = Callable[[Tree], list[str]]


def read_tree() -> Tree:
    """Return the tree that this file stands in."""
    paths = [path for folder in SIZED for path in sorted((ROOT / folder).rglob("*.py")) if ".cache" not in path.parts]
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return Tree(
        files, import_graph(files), import_graph(files, runtime=True), project["tool"]["importlinter"]["contracts"]
    )


def import_graph(files: Mapping[str, str], *, runtime: bool = False) -> Imports:
    """Return what the package's modules import of it.

    Args:
        files: The texts of the files by their paths.
        runtime: Leave out what is imported for type checking only, or inside functions.
    """
    # Without its cache, which goes by times of files and keeps imports that are gone.
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=runtime, cache_dir=None)
    found = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
    if not runtime:
        return found
    late = {module_of(path): late_lines(text) for path, text in files.items()}

    def at_once(importer: str, imported: str) -> bool:
        details = graph.get_import_details(importer=importer, imported=imported)
        return any(each["line_number"] not in late.get(importer, ()) for each in details)

    return {module: {each for each in imported if at_once(module, each)} for module, imported in found.items()}


def late_lines(text: str) -> set[int]:
    """Return the lines of a file that stand inside functions."""
    found: set[int] = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, FUNCTIONS):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def module_of(path: str) -> str:
    """Return the dotted name of a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a file's text."""
    return ast.parse(text)


# Sizes.


def large_files(tree: Tree) -> list[str]:
    """Find files of too many lines."""
    sizes = {path: len(text.splitlines()) for path, text in tree.files.items()}
    found = {path: size for path, size in sizes.items() if size > MOST_LINES_OF_A_FILE}
    return [f"{path}: {size} lines, at most {MOST_LINES_OF_A_FILE}" for path, size in found.items()]


def large_functions(tree: Tree) -> list[str]:
    """Find functions of too many lines."""
    found = []
    for path, text in tree.files.items():
        for node in ast.walk(parsed(text)):
            length = (node.end_lineno or 0) - node.lineno + 1 if isinstance(node, FUNCTIONS) else 0
            if isinstance(node, FUNCTIONS) and length > MOST_LINES_OF_A_FUNCTION:
                found.append(f"{path}:{node.lineno}: {node.name}: {length} lines, at most {MOST_LINES_OF_A_FUNCTION}")
    return found


def large_classes(tree: Tree) -> list[str]:
    """Find classes of too many public methods; properties are not counted."""
    found = []
    for path, text in tree.files.items():
        for node in ast.walk(parsed(text)):
            if not isinstance(node, ast.ClassDef):
                continue
            count = sum(isinstance(each, FUNCTIONS) and _is_public_method(each) for each in node.body)
            if count > MOST_METHODS_OF_A_CLASS:
                counted = f"{count} public methods, at most {MOST_METHODS_OF_A_CLASS}"
                found.append(f"{path}:{node.lineno}: {node.name}: {counted}")
    return found


def _is_public_method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    # @property, and @name.setter, which is its other half.
    properties = ("property", "setter")
    decorators = (getattr(each, "id", getattr(each, "attr", "")) for each in node.decorator_list)
    return not node.name.startswith("_") and not any(each in properties for each in decorators)


def small_files(tree: Tree) -> list[str]:
    """Find small files that one other module imports: they belong in it."""
    importers: dict[str, list[str]] = {}
    for module, imported in tree.imports.items():
        for each in imported:
            importers.setdefault(each, []).append(module)
    found = []
    for path, text in tree.package():
        size, known = len(text.splitlines()), importers.get(module_of(path), [])
        if size < LEAST_LINES_OF_A_FILE and len(known) == 1 and not may_be_small(path, text):
            found.append(f"{path}: {size} lines, imported by {known[0]} only")
    return found


def may_be_small(path: str, text: str) -> bool:
    """Whether a file may be small although one module imports it: contracts, entry points, and what runs elsewhere."""
    given = PurePosixPath(path)
    contract = given.name in ("core.py", "__init__.py", "__main__.py")
    elsewhere = path.startswith(LIBRARY) or any(part in RUN_ELSEWHERE for part in given.parts)
    return contract or elsewhere or re.search(r"^if __name__ == ", text, re.MULTILINE) is not None


def full_folders(tree: Tree) -> list[str]:
    """Find folders of too many Python files."""
    counts = Counter(path.rpartition("/")[0] for path, _ in tree.package())
    found = {folder: count for folder, count in sorted(counts.items()) if count > MOST_FILES_OF_A_FOLDER}
    return [f"{folder}/: {count} Python files, at most {MOST_FILES_OF_A_FOLDER}" for folder, count in found.items()]


def too_many_files(tree: Tree) -> list[str]:
    """Count the package's files: all, and those outside the environments that ship."""
    paths = [path for path, _ in tree.package()]
    outside = [path for path in paths if not path.startswith(LIBRARY)]
    found = [f"{PACKAGE}/: {len(paths)} files, at most {MOST_FILES}"] if len(paths) > MOST_FILES else []
    if len(outside) > MOST_FILES_OUTSIDE_THE_LIBRARY:
        found.append(f"outside {LIBRARY}: {len(outside)} files, at most {MOST_FILES_OUTSIDE_THE_LIBRARY}")
    return found


def too_many_lines(tree: Tree) -> list[str]:
    """Count the package's lines."""
    lines = sum(len(text.splitlines()) for _, text in tree.package())
    return [] if lines <= MOST_LINES else [f"{PACKAGE}/: {lines} lines, at most {MOST_LINES}"]


# Imports.


def components(imports: Imports) -> list[list[str]]:
    """Return the sets of modules that import each other in a circle; a module outside of any stands alone."""
    order: list[str] = []
    seen: set[str] = set()
    for start in imports:
        stack = [] if start in seen else [(start, iter(sorted(imports[start])))]
        seen.add(start)
        while stack:
            module, rest = stack[-1]
            following = next((each for each in rest if each not in seen), None)
            if following is None:
                order.append(module)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(imports.get(following, ())))))
    importers: dict[str, set[str]] = {}
    for module, imported in imports.items():
        for each in imported:
            importers.setdefault(each, set()).add(module)
    placed: set[str] = set()
    found = []
    for start in reversed(order):
        group, waiting = [], [start]
        while waiting:
            module = waiting.pop()
            if module not in placed:
                placed.add(module)
                group.append(module)
                waiting += importers.get(module, ())
        if group:
            found.append(sorted(group))
    return found


def _shortest_cycle(imports: Imports, start: str) -> list[str]:
    """Return the way from a module back to it."""
    before: dict[str, str] = {}
    waiting = deque([start])
    while waiting and start not in before:
        module = waiting.popleft()
        for each in sorted(imports.get(module, ())):
            if each not in before:
                before[each] = module
                waiting.append(each)
    way = [start]
    while way[-1] != start or len(way) == 1:
        way.append(before[way[-1]])
    return way[::-1]


def import_cycles(tree: Tree) -> list[str]:
    """Find modules in a circle of imports, imports for type checking included, each with a shortest circle."""
    return [
        f"of {len(group)} modules: {' > '.join(_shortest_cycle(tree.imports, module))}"
        for group in components(tree.imports)
        for module in group
        if len(group) > 1
    ]


def longest_chain(imports: Imports) -> list[str]:
    """Return the longest chain of modules each of which imports the next; those of a circle follow each other."""
    groups = components(imports)
    group_of = {module: index for index, group in enumerate(groups) for module in group}
    needs = {
        index: {group_of[each] for module in group for each in imports.get(module, ())} - {index}
        for index, group in enumerate(groups)
    }
    best: dict[int, list[str]] = {}
    for index in graphlib.TopologicalSorter(needs).static_order():
        rest = max((best[each] for each in sorted(needs[index])), key=len, default=[])
        best[index] = [*groups[index], *rest]
    return max(best.values(), key=len, default=[])


def long_chains(tree: Tree) -> list[str]:
    """Find how far the longest import chain is above the most that is allowed, a line for each module."""
    chain = longest_chain(tree.runtime)
    most = LONGEST_CHAIN
    return [f"number {number} of {len(chain)}: {each}" for number, each in enumerate(chain, 1) if number > most]


def rules_of_modules(tree: Tree) -> list[str]:
    """Find import rules that name a single module in the place of a package; files of the package's root may be."""
    packages = {module_of(path) for path, _ in tree.package() if path.endswith("/__init__.py")}
    found = []
    for contract in tree.contracts:
        named = [each for value in contract.values() if isinstance(value, list) for each in value]
        inside = [name for name in re.findall(r"[\w.]+", " ".join(map(str, named))) if name.startswith(f"{PACKAGE}.")]
        single = [name for name in inside if name.count(".") > 1 and name not in packages]
        found += [f"{contract['name']}: {name} is no package" for name in single]
    return found


# What stands in files.


def headed_docstrings(tree: Tree) -> list[str]:
    """Find docstrings with the headings "Owns:" and "Refuses:"."""
    found = []
    for path, text in tree.package():
        for node in ast.walk(parsed(text)):
            said = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if said is not None and re.search(r"\b(Owns|Refuses):", said):
                found.append(path if isinstance(node, ast.Module) else f"{path}: {node.name}")
    return found


def broad_handlers(text: str) -> Iterator[tuple[int, str]]:
    """Yield every handler of everything: its line, and its line's text."""
    lines = text.splitlines()
    for node in ast.walk(parsed(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(each is None or (isinstance(each, ast.Name) and each.id in BROAD) for each in caught):
            yield node.lineno, lines[node.lineno - 1]


def unexplained_handlers(tree: Tree) -> list[str]:
    """Find handlers of everything that do not say, on their line, why: of which boundary they are, or what they undo.

    What raises again says so in a comment, anything else in ``# noqa: BLE001 - why``, which ruff asks for.
    """
    found = []
    for path, text in tree.package():
        for line, said in broad_handlers(text):
            if not re.search(r"# (noqa: BLE001 - )?(?!noqa)\w+", said):
                found.append(f"{path}:{line}: {said.strip()}")
    return found


RULES: Final[Mapping[str, Rule]] = {
    "files are not too large": large_files,
    "functions are not too large": large_functions,
    "classes are not too large": large_classes,
    "small files have several importers": small_files,
    "folders are not too full": full_folders,
    "files are not too many": too_many_files,
    "lines are not too many": too_many_lines,
    "imports have no cycle": import_cycles,
    "import chains are not too long": long_chains,
    "import rules name packages": rules_of_modules,
    "docstrings have no headings": headed_docstrings,
    "broad handlers say why": unexplained_handlers,
}


def main(names: Sequence[str]) -> int:
    """Print what breaks rules (all, or those named), and return 1 where anything does."""
    sys.path.insert(0, str(ROOT))
    tree = read_tree()
    found = {name: rule(tree) for name, rule in RULES.items() if not names or name in names}
    lines = [f"{len(broken):5d}  {name}" for name, broken in found.items()]
    for name, broken in found.items():
        lines += ["", f"{name}: {len(broken)}", *(f"  {each}" for each in broken)]
    sys.stdout.write("\n".join([*lines, ""]))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
