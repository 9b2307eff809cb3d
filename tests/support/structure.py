"""The rules that the shape of the code keeps: sizes, folders, imports, docstrings, broad handlers, and counted limits.

Each rule is a function from a :class:`Tree` to what breaks it, each figure a count with its limit; ``python
tests/house.py`` prints both.
"""

from __future__ import annotations

import ast
import builtins
import functools
import graphlib
import re
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, get_args

import grimp
from pydantic import BaseModel

from support.naming import Wording, bound_names, nodes, wording

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = "turnwise"
SIZED: Final = (PACKAGE, "benchmarks", "examples", "tests/support")

MOST_LINES_OF_A_FILE: Final = 600
MOST_LINES_OF_A_FUNCTION: Final = 60
MOST_METHODS_OF_A_CLASS: Final = 12
LEAST_LINES_OF_A_FILE: Final = 80
MOST_FILES_OF_A_FOLDER: Final = 14
MOST_LINES: Final = {"the core": 94_000, "ext": 29_000}
LONGEST_CHAIN: Final = 20
MOST_CONFIG_KEYS: Final = 360
MOST_VAGUE_IN_A_ROOM: Final = 0.015
MOST_VAGUE: Final = 0.005
MOST_PHRASES_A_LINE: Final = 6 / 10_000

MODULE_ALIASES: Final = ("np", "npt", "pd", "nn", "F", "pa", "dist", "tl")

LIBRARY: Final = f"{PACKAGE}/ext/environments/"
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
        config_keys: The dotted leaf keys of the configuration of training.
        tests: The text of each test file by its path, helpers that tests share included.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    imports: Imports = field(default_factory=dict)
    runtime: Imports = field(default_factory=dict)
    contracts: Sequence[Mapping[str, Any]] = ()
    config_keys: Set[str] = frozenset()
    tests: Mapping[str, str] = field(default_factory=dict)

    def package(self) -> Iterator[tuple[str, str]]:
        """Yield the files of the package, with their texts."""
        return ((path, text) for path, text in self.files.items() if path.startswith(f"{PACKAGE}/"))


Rule = Callable[[Tree], list[str]]


def read_tree() -> Tree:
    """Return the tree that this file stands in."""
    files = {path: text for folder in SIZED for path, text in read_folder(folder)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return Tree(
        files,
        with_stubs(import_graph(files)),
        import_graph(files, runtime=True),
        project["tool"]["importlinter"]["contracts"],
        config_keys(),
        dict(read_folder("tests")),
    )


def with_stubs(imports: Imports) -> Imports:
    """Return the imports of modules, with those of sub-packages that export lazily what their stub imports."""
    lazy = {
        module_of(path.relative_to(ROOT).with_suffix(".py").as_posix()): {
            str(node.module) for node in nodes(path.read_text(encoding="utf-8")) if isinstance(node, ast.ImportFrom)
        }
        for path in (ROOT / PACKAGE).glob("*/**/__init__.pyi")
    }
    return {module: {*imported, *lazy.get(module, ())} for module, imported in imports.items()}


def read_folder(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the paths below the root of a folder's Python files, with their texts."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if ".cache" not in path.parts:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def config_keys() -> set[str]:
    """Return the leaf keys of the configuration of training."""
    from turnwise import TrainConfig

    return set(leaf_keys(TrainConfig))


def leaf_keys(section: type[BaseModel], above: tuple[type[BaseModel], ...] = ()) -> Iterator[str]:
    """Yield the dotted keys of a section that hold no section; those of sections in lists, mappings and unions once."""
    for name, info in section.model_fields.items():
        inner = [nested for nested in sections_in(info.annotation) if nested not in above]
        if not inner:
            yield name
        for nested in inner:
            yield from (f"{name}.{key}" for key in leaf_keys(nested, (*above, section)))


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def import_graph(files: Mapping[str, str], *, runtime: bool = False) -> Imports:
    """Return what the package's modules import of it.

    Args:
        files: The texts of the files by their paths.
        runtime: Leave out what is imported for type checking only, or inside functions.
    """
    # Without its cache, which goes by times of files and keeps imports that are gone.
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=runtime, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
    if not runtime:
        return imports
    late = {module_of(path): late_lines(text) for path, text in files.items() if path.startswith(f"{PACKAGE}/")}

    def is_at_once(importer: str, imported: str) -> bool:
        details = graph.get_import_details(importer=importer, imported=imported)
        return any(detail["line_number"] not in late.get(importer, ()) for detail in details)

    return {
        importer: {imported for imported in modules if is_at_once(importer, imported)}
        for importer, modules in imports.items()
    }


def late_lines(text: str) -> set[int]:
    """Return the lines of a file that stand inside functions."""
    lines: set[int] = set()
    for node in nodes(text):
        if isinstance(node, FUNCTIONS):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def module_of(path: str) -> str:
    """Return the dotted name of a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# Sizes.


def large_files(tree: Tree) -> list[str]:
    """Find files of too many lines."""
    sizes = {path: len(text.splitlines()) for path, text in tree.files.items()}
    oversized = {path: size for path, size in sizes.items() if size > MOST_LINES_OF_A_FILE}
    return [f"{path}: {size} lines, at most {MOST_LINES_OF_A_FILE}" for path, size in oversized.items()]


def large_functions(tree: Tree) -> list[str]:
    """Find functions of too many lines."""
    oversized = []
    for path, text in tree.files.items():
        for node in nodes(text):
            length = (node.end_lineno or 0) - node.lineno + 1 if isinstance(node, FUNCTIONS) else 0
            if isinstance(node, FUNCTIONS) and length > MOST_LINES_OF_A_FUNCTION:
                oversized.append(
                    f"{path}:{node.lineno}: {node.name}: {length} lines, at most {MOST_LINES_OF_A_FUNCTION}"
                )
    return oversized


def large_classes(tree: Tree) -> list[str]:
    """Find classes of too many public methods; properties are not counted."""
    oversized = []
    for path, text in tree.files.items():
        for node in nodes(text):
            if not isinstance(node, ast.ClassDef):
                continue
            count = sum(isinstance(member, FUNCTIONS) and _is_public_method(member) for member in node.body)
            if count > MOST_METHODS_OF_A_CLASS:
                counted = f"{count} public methods, at most {MOST_METHODS_OF_A_CLASS}"
                oversized.append(f"{path}:{node.lineno}: {node.name}: {counted}")
    return oversized


def _is_public_method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    # @property, and @name.setter, which is its other half.
    properties = ("property", "setter")
    decorators = (getattr(decorator, "id", getattr(decorator, "attr", "")) for decorator in node.decorator_list)
    return not node.name.startswith("_") and not any(name in properties for name in decorators)


def small_files(tree: Tree) -> list[str]:
    """Find small files that one other module imports: they belong in it."""
    importers: dict[str, list[str]] = {}
    for module, imported in tree.imports.items():
        for module_name in imported:
            importers.setdefault(module_name, []).append(module)
    offenders = []
    for path, text in tree.package():
        size, users = len(text.splitlines()), importers.get(module_of(path), [])
        if size < LEAST_LINES_OF_A_FILE and len(users) == 1 and not may_be_small(path, text):
            offenders.append(f"{path}: {size} lines, imported by {users[0]} only")
    return offenders


def may_be_small(path: str, text: str) -> bool:
    """Whether a file may be small although one module imports it: contracts, entry points, and what runs elsewhere."""
    posix_path = PurePosixPath(path)
    contract = posix_path.name in ("core.py", "__init__.py", "__main__.py")
    elsewhere = path.startswith(LIBRARY) or any(part in RUN_ELSEWHERE for part in posix_path.parts)
    return contract or elsewhere or re.search(r"^if __name__ == ", text, re.MULTILINE) is not None


def full_folders(tree: Tree) -> list[str]:
    """Find folders of too many Python files."""
    counts = Counter(path.rpartition("/")[0] for path, _ in tree.package())
    overfull = {folder: count for folder, count in sorted(counts.items()) if count > MOST_FILES_OF_A_FOLDER}
    return [f"{folder}/: {count} Python files, at most {MOST_FILES_OF_A_FOLDER}" for folder, count in overfull.items()]


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
            following = next((neighbour for neighbour in rest if neighbour not in seen), None)
            if following is None:
                order.append(module)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(imports.get(following, ())))))
    importers: dict[str, set[str]] = {}
    for module, imported in imports.items():
        for target in imported:
            importers.setdefault(target, set()).add(module)
    placed: set[str] = set()
    groups = []
    for start in reversed(order):
        group, waiting = [], [start]
        while waiting:
            module = waiting.pop()
            if module not in placed:
                placed.add(module)
                group.append(module)
                waiting += importers.get(module, ())
        if group:
            groups.append(sorted(group))
    return groups


def _shortest_cycle(imports: Imports, start: str) -> list[str]:
    """Return the way from a module back to it."""
    previous: dict[str, str] = {}
    waiting = deque([start])
    while waiting and start not in previous:
        module = waiting.popleft()
        for target in sorted(imports.get(module, ())):
            if target not in previous:
                previous[target] = module
                waiting.append(target)
    cycle = [start]
    while cycle[-1] != start or len(cycle) == 1:
        cycle.append(previous[cycle[-1]])
    return cycle[::-1]


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
        index: {group_of[target] for module in group for target in imports.get(module, ())} - {index}
        for index, group in enumerate(groups)
    }
    best: dict[int, list[str]] = {}
    for index in graphlib.TopologicalSorter(needs).static_order():
        rest = max((best[needed] for needed in sorted(needs[index])), key=len, default=[])
        best[index] = [*groups[index], *rest]
    return max(best.values(), key=len, default=[])


def mutual_folders(tree: Tree) -> list[str]:
    """Find folders of a room that import each other when they are imported."""
    edges = set()
    for importer, modules in tree.runtime.items():
        folder = room_folder(importer)
        edges |= {(folder, other) for module in modules if (other := room_folder(module))} if folder else set()
    return [
        f"{room}: {first} and {second} import each other"
        for (room, first), (other_room, second) in sorted(edges)
        if room == other_room and first < second and ((room, second), (room, first)) in edges
    ]


def room_folder(module: str) -> tuple[str, str] | None:
    """Return the room and the folder of it that a module stands in, or None where it stands in no folder of a room."""
    parts = module.removeprefix(f"{PACKAGE}.ext.").removeprefix(f"{PACKAGE}.").split(".")
    return (parts[0], parts[1]) if len(parts) > 2 else None


def import_aliases(tree: Tree) -> list[str]:
    """Find modules of the package under another name and, in the package, aliases of names that clash with nothing."""
    modules = {module_of(path) for path, _ in tree.package()}
    modules |= {module.rpartition(".")[0] for module in modules}
    aliases = []
    for path, text in tree.files.items():
        for node in nodes(text):
            for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
                if alias.asname in (None, alias.name, *MODULE_ALIASES):
                    continue
                imported = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                is_needless = isinstance(node, ast.Import) or alias.name not in taken_names(text)
                if imported in modules or (path.startswith(f"{PACKAGE}/") and is_needless):
                    aliases.append(f"{path}: {imported} as {alias.asname}")
    return aliases


@functools.cache
def taken_names(text: str) -> Set[str]:
    """Return the builtin names and those that a file defines, assigns or imports, aliased ones by their aliases."""
    names = {*dir(builtins), *(name for _, name in bound_names(text))}
    for node in nodes(text):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def rules_of_modules(tree: Tree) -> list[str]:
    """Find import rules that name a single module in the place of a package; files of the package's root may be."""
    packages = {module_of(path) for path, _ in tree.package() if path.endswith("/__init__.py")}
    offenders = []
    for contract in tree.contracts:
        named = [entry for value in contract.values() if isinstance(value, list) for entry in value]
        modules = [name for name in re.findall(r"[\w.]+", " ".join(map(str, named))) if name.startswith(f"{PACKAGE}.")]
        single = [name for name in modules if name.count(".") > 1 and name not in packages]
        offenders += [f"{contract['name']}: {name} is no package" for name in single]
    return offenders


# What stands in files.


def headed_docstrings(tree: Tree) -> list[str]:
    """Find docstrings with the headings "Owns:" and "Refuses:"."""
    offenders = []
    for path, text in tree.package():
        for node in nodes(text):
            docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if docstring is not None and re.search(r"\b(Owns|Refuses):", docstring):
                offenders.append(path if isinstance(node, ast.Module) else f"{path}: {node.name}")
    return offenders


def broad_handlers(text: str) -> Iterator[tuple[int, str]]:
    """Yield every handler of everything: its line, and its line's text."""
    lines = text.splitlines()
    for node in nodes(text):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(
            caught_type is None or (isinstance(caught_type, ast.Name) and caught_type.id in BROAD)
            for caught_type in caught
        ):
            yield node.lineno, lines[node.lineno - 1]


def unexplained_handlers(tree: Tree) -> list[str]:
    """Find handlers of everything that do not say, on their line, why: of which boundary they are, or what they undo.

    What raises again says so in a comment, anything else in ``# noqa: BLE001 - why``, which ruff asks for.
    """
    offenders = []
    for path, text in tree.package():
        for line, source_line in broad_handlers(text):
            if not re.search(r"# (noqa: BLE001 - )?(?!noqa)\w+", source_line):
                offenders.append(f"{path}:{line}: {source_line.strip()}")
    return offenders


RULES: Final[Mapping[str, Rule]] = {
    "files are not too large": large_files,
    "functions are not too large": large_functions,
    "classes are not too large": large_classes,
    "small files have several importers": small_files,
    "folders are not too full": full_folders,
    "imports have no cycle": import_cycles,
    "imports have no alias": import_aliases,
    "folders of a room import each other one way": mutual_folders,
    "import rules name packages": rules_of_modules,
    "docstrings have no headings": headed_docstrings,
    "broad handlers say why": unexplained_handlers,
}


# Figures.


@dataclass(frozen=True)
class Figure:
    """Something that is counted, and the most that there may be.

    Attributes:
        count: How many there are.
        limit: How many there may be.
        detail: Where to begin, a line each.
    """

    count: int
    limit: int
    detail: Sequence[str] = ()


def figures(tree: Tree) -> dict[str, Figure]:
    """Return what is counted, by what it is."""
    chain = longest_chain(tree.runtime)
    return {
        **{f"lines of {part}": Figure(count, MOST_LINES[part]) for part, count in lines_by_part(tree).items()},
        "modules in the longest import chain": Figure(len(chain), LONGEST_CHAIN, chain),
        "configuration keys": Figure(len(tree.config_keys), MOST_CONFIG_KEYS, keys_by_section(tree)),
        **wording_figures(tree),
    }


def lines_by_part(tree: Tree) -> dict[str, int]:
    """Count the lines of the core and of what plugs into it."""
    counts = dict.fromkeys(MOST_LINES, 0)
    for path, text in tree.package():
        counts["ext" if path.startswith(f"{PACKAGE}/ext/") else "the core"] += len(text.splitlines())
    return counts


def keys_by_section(tree: Tree) -> list[str]:
    """Count the configuration keys by their first section, most first."""
    sections = Counter(key.partition(".")[0] for key in tree.config_keys)
    return [f"{count} in {section}" for section, count in sections.most_common()]


def wording_figures(tree: Tree) -> dict[str, Figure]:
    """Count vague names by room, over all and in tests, and phrases over all."""
    by_room: dict[str, dict[str, Wording]] = {}
    for path, text in tree.package():
        by_room.setdefault(room_of(path), {})[path] = wording(text)
    by_path = {path: words for paths in by_room.values() for path, words in paths.items()}
    shares = {f"vague names in {room}": (paths, MOST_VAGUE_IN_A_ROOM) for room, paths in by_room.items()}
    shares["vague names in the package"] = (by_path, MOST_VAGUE)
    shares["vague names in tests"] = ({path: wording(text) for path, text in tree.tests.items()}, MOST_VAGUE_IN_A_ROOM)
    counts = {}
    for name, (paths, share) in shares.items():
        vague = {path: len(words.vague) for path, words in paths.items()}
        counts[name] = Figure(
            sum(vague.values()), int(share * sum(words.names for words in paths.values())), worst_files(vague)
        )
    phrases = {path: len(words.phrases) for path, words in by_path.items()}
    limit = int(MOST_PHRASES_A_LINE * sum(words.lines for words in by_path.values()))
    counts["phrases in the package"] = Figure(sum(phrases.values()), limit, worst_files(phrases))
    return counts


def worst_files(counts: Mapping[str, int]) -> list[str]:
    """Return the ten files that have the most of something."""
    return [f"{count} in {path}" for path, count in Counter(counts).most_common(10)]


def room_of(path: str) -> str:
    """Return the room of a file of the package: ``recorder``, ``ext/report``, or the package for files beside these."""
    parts = PurePosixPath(path).parts[1:-1]
    return "/".join(parts[: 2 if parts[:1] == ("ext",) else 1]) or PACKAGE
