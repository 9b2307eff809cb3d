"""Patches to the rows of ``swe`` that leave the judge alone: cheats that are appended, and honest mistakes."""

from __future__ import annotations

import ast
import copy
import difflib
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from turnwise.ext.environments.swe.paths import touched_files
from turnwise.ext.environments.swe.rows import Instance
from turnwise.ext.environments.swe.snapshot import checkout

_OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


def base_of(instance: Instance, cache: Path) -> Path:
    """The repository of a row, which is not to be changed."""
    assert instance.snapshot is not None
    return checkout(instance.snapshot, commit=instance.commit, setup_patch=instance.setup_patch, folder=cache)


def difference(path: str, old: str, new: str) -> bytes:
    """A diff of one file."""
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n{''.join(lines)}".encode()


def appended(instance: Instance, cache: Path, text: str) -> bytes:
    """A diff that appends to the package's ``__init__.py``."""
    path = f"{instance.repo.rpartition('/')[2]}/__init__.py"
    text_before = (base_of(instance, cache) / path).read_text("utf-8")
    return difference(path, text_before, f"{text_before.rstrip()}\n\n{text}\n")


def mutants(instance: Instance, cache: Path, seed: int) -> Iterator[bytes]:
    """Yield solutions of a row that were made wrong in one place: an operator, a constant, a statement, a result."""
    base = base_of(instance, cache)
    names = sorted(name for name in touched_files(instance.patch) if name.endswith(".py"))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes((base / name).read_bytes())
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        subprocess.run(command, cwd=folder, input=instance.patch.encode(), check=True)
        solved = {name: (Path(folder) / name).read_text("utf-8") for name in names}
    rng = random.Random(seed)
    originals = {name: (base / name).read_text("utf-8") for name in names}
    changes = [
        (name, number) for name in names for number in range(len(_mutations(ast.parse(solved[name]), originals[name])))
    ]
    rng.shuffle(changes)
    for name, number in changes:
        tree = ast.parse(solved[name])
        _mutations(tree, originals[name])[number](rng)
        mutated = {**solved, name: ast.unparse(ast.fix_missing_locations(tree)) + "\n"}
        yield b"".join(difference(name, originals[name], mutated[name]) for name in names)


def _mutations(tree: ast.Module, original: str) -> list[Callable[[random.Random], None]]:
    """The changes that can be made to functions in which a solution differs from what was there; to all, if none do."""
    old = {ast.dump(node) for node in ast.walk(ast.parse(original)) if isinstance(node, ast.FunctionDef)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    changed = [function for function in functions if ast.dump(function) not in old]
    return [
        change for function in changed or functions for node in ast.walk(function) for change in _node_mutations(node)
    ]


def _node_mutations(node: ast.AST) -> list[Callable[[random.Random], None]]:
    mutations: list[Callable[[random.Random], None]] = []
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPPOSITES:
        mutations.append(lambda _: node.ops.__setitem__(0, _opposite(node.ops[0])))
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _OPPOSITES:
        mutations.append(lambda _: setattr(node, "op", _opposite(node.op)))
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        mutations.append(lambda rng: setattr(node, "value", node.value + rng.choice((-1, 1))))
    if isinstance(node, ast.Return) and node.value is not None:
        mutations.append(lambda _: setattr(node, "value", ast.Constant(None)))
    if isinstance(node, (ast.If, ast.IfExp)):
        mutations.append(lambda _: setattr(node, "test", ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))))
    if isinstance(node, ast.FunctionDef) and node.body:
        error = ast.parse("raise ValueError('a mistake')").body[0]
        mutations.append(lambda rng: node.body.insert(rng.randrange(len(node.body)), error))
        mutations.append(lambda rng: node.body.__setitem__(rng.randrange(len(node.body)), ast.Pass()))
    return mutations


def _opposite(operator: ast.AST) -> ast.AST:
    return _OPPOSITES[type(operator)]()
