"""The process of the tests: runs them against functions of a solution that is in another process."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
from typing import Any

from turnwise.ext.environments.code.inside.wire import Peer, Remote, lines_of, raise_limits, take_pipes

_SAFE = ("call", "getattr", "setattr", "getitem", "setitem", "len", "iter", "next", "str")
_HIDDEN = ("_", "gi_", "cr_", "ag_", "f_", "tb_", "co_")
"""Prefixes of attributes that lead to frames and code, such as those of generators."""


def guard(op: str, target: Any, args: Any) -> None:
    """Refuse operations by which a solution would reach more than the objects that tests pass to it."""
    named = op in ("getattr", "setattr")
    if op not in _SAFE or (named and str(args[0]).startswith(_HIDDEN)) or (named and isinstance(target, type)):
        raise PermissionError(f"a solution may not do this ({op})")


class Named(Remote):
    """A name of the solution: a function or a class that it defines."""

    def __init__(self, peer: Any, name: str) -> None:
        super().__init__(peer, name)

    def _do(self, op: str, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask(op, {"name": self._number}, args, kwargs)


class Case:
    """Context of one test: reports an exception as its verdict, and suppresses it so that the next test runs."""

    def __init__(self, report: Any, number: int) -> None:
        self._report, self._number = report, number

    def __enter__(self) -> None:
        self._report({"begin": self._number})

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if isinstance(error, EOFError) and not error.args:
            return False
        text = "" if error is None else f"{kind.__name__}: {error}"[:500].rstrip(": ")
        self._report({"number": self._number, "ok": error is None, "error": text})
        return True


def isolate_statements(tree: ast.Module, name: str) -> int:
    """Wrap each testing statement of a function in its own ``Case``; return their number."""
    count = 0
    for function in tree.body:
        if not (isinstance(function, ast.FunctionDef) and function.name == name and function.args.args):
            continue
        candidate = function.args.args[0].arg
        body: list[ast.stmt] = []
        for statement in function.body:
            tests = not isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and any(
                isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id == candidate)
                for node in ast.walk(statement)
            )
            if tests:
                call = ast.Call(ast.Name("__case__", ast.Load()), [ast.Constant(count)], [])
                body.append(ast.With(items=[ast.withitem(context_expr=call)], body=[statement]))
                count += 1
            else:
                body.append(statement)
        function.body = body
    ast.fix_missing_locations(tree)
    return count


def undefined_names(trees: list[ast.AST], names: dict[str, Any]) -> list[str]:
    """Return the names that code uses and that neither it nor ``names`` nor builtins define."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    bound |= {alias.asname or alias.name.split(".")[0] for node in nodes
              if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}  # fmt: skip
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return sorted(name for name in used if name not in bound and name not in names and not hasattr(builtins, name))


def run(code: Any, names: dict[str, Any]) -> None:
    """Run code in a namespace."""
    exec(code if not isinstance(code, str) else compile(code, "<tests>", "exec"), names)


def main() -> None:
    """Run the tests and report the verdict of each."""
    read, write = take_pipes()

    def put(data: bytes) -> None:
        while data:
            data = data[os.write(write, data) :]

    receive = lines_of(read)
    begin = receive()

    def report(verdict: Any) -> None:
        put(b"V" + json.dumps([begin["nonce"], verdict]).encode() + b"\n")

    raise_limits()
    peer = Peer(receive, lambda message: put(b"C" + json.dumps(message).encode() + b"\n"), guard)
    try:
        run_tests(begin, peer, report)
    except BaseException as error:  # noqa: BLE001 - tests that cannot run are reported as broken
        report({"broken": f"{type(error).__name__}: {error}"[:1000]})
    os._exit(0)


def run_tests(begin: dict[str, Any], peer: Peer, report: Any) -> None:
    """Run the tests of the first message."""
    names: dict[str, Any] = {"__name__": "tests"}
    for line in begin["imports"]:
        try:
            run(line, names)
        except ImportError:
            continue  # of a package that is not installed; a test that needs it fails
    if begin["prelude"]:
        run(begin["prelude"], names)
    tests = [ast.parse(test) for test in begin["tests"]]
    check = ast.parse(begin["check"])
    for name in undefined_names([*tests, check], names):
        names[name] = importlib.import_module(name) if name in stdlib_modules() else Named(peer, name)
    entry = begin["entry"]
    if entry:
        names[entry] = Named(peer, entry)
    count = isolate_statements(check, "check") if entry else 0
    names["__case__"] = lambda number: Case(report, number)
    run(compile(check, "<tests>", "exec"), names)
    report({"count": max(count, 1) if entry else len(tests)})
    if entry and count:
        names["check"](names[entry])
    elif entry:
        with Case(report, 0):
            names["check"](names[entry])
    for number, test in enumerate(tests):
        with Case(report, number):
            run(compile(test, "<tests>", "exec"), dict(names))
    report({"done": True})


def stdlib_modules() -> Any:
    """Return the names of the modules of the standard library."""
    common = ("math", "re", "collections", "itertools", "functools", "string", "random", "datetime", "copy", "cmath")
    return sys.stdlib_module_names if sys.version_info >= (3, 10) else common


if __name__ == "__main__":
    main()
