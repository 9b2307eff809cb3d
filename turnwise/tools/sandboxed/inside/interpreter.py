"""A persistent interpreter: reads cells of Python, runs them and reports how each ended."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
import os
import signal
import sys
import tempfile
import traceback
import types
from typing import Any

_MOST_PLOTS = 4


def show(value: Any, names: dict[str, Any]) -> None:
    """Print the value of a cell's last expression, as an interactive interpreter does."""
    if value is not None:
        sys.stdout.write(f"{value!r}\n")
        names["_"] = value


def run(code: str, name: str, names: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
    """Run a cell."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    # Not by ast.parse: its frame would be in the traceback of a syntax error.
    tree: Any = compile(code, name, "exec", ast.PyCF_ONLY_AST)
    last_expression = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    parts: list[Any] = [compile(tree, name, "exec", flags)]
    if isinstance(last_expression, ast.Expr):
        parts.append(compile(ast.Expression(last_expression.value), name, "eval", flags))
    for number, part in enumerate(parts):
        value = eval(part, names)
        if part.co_flags & inspect.CO_COROUTINE:
            value = loop.run_until_complete(value)
        if number:
            show(value, names)


def report(error: BaseException) -> None:
    """Write a traceback without the frames of this program."""
    report = traceback.TracebackException.from_exception(error)
    visited: set[int] = set()
    pending = [report]
    while pending:
        exception = pending.pop()
        if id(exception) in visited:
            continue
        visited.add(id(exception))
        frames = [frame for frame in exception.stack if frame.filename != "<string>"]
        exception.stack = traceback.StackSummary.from_list(frames)
        pending += [other for other in (exception.__cause__, exception.__context__) if other is not None]
    sys.stderr.write("".join(report.format()))


def plots() -> list[str]:
    """Save and close the open figures; return their files."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    files = []
    for number in pyplot.get_fignums()[:_MOST_PLOTS]:
        handle, path = tempfile.mkstemp(suffix=".png", prefix="plot-")
        os.close(handle)
        pyplot.figure(number).savefig(path, format="png", dpi=80, bbox_inches="tight")
        files.append(path)
    pyplot.close("all")
    return files


def cell(request: dict[str, Any], number: int, names: dict[str, Any], loop: Any) -> dict[str, Any]:
    """Run a request's code and return how it ended."""
    error: BaseException | None = None
    saved: list[str] = []
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run(request["code"], f"<cell {number}>", names, loop)
        if request["plots"]:
            saved = plots()
    except BaseException as raised:  # noqa: BLE001 - a cell may raise anything, and the interpreter continues
        error = raised
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isinstance(error, SystemExit):
        sys.stderr.write(f"SystemExit: {error.code} (the interpreter continues)\n")
    elif error is not None:
        report(error)
    return {"error": None if error is None else type(error).__name__[:200], "plots": saved}


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Cells neither read requests nor can close the way back.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.setdefault("MPLBACKEND", "Agg")
    sys.path.insert(0, "")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    pid = os.getpid()
    for number, line in enumerate(requests, 1):
        request = json.loads(line)
        answer = cell(request, number, vars(module), loop)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # the cell closed it
        if os.getpid() != pid:
            os._exit(0)  # a process that the cell forked, and that came this far: one of them answers
        os.write(replies, (request["marker"] + json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
