"""Row formats of published code datasets."""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from turnwise.errors import TaskError, shown
from turnwise.ext.environments.code.answers import finished
from turnwise.ext.environments.code.problems import Asserts, Case, Problem

_MOST_UNPACKED: Final = 512 * 2**20
_STDIN: Final = ("stdin", "stdin_stdout", "")
_Row = Mapping[str, Any]


def problem_of(data: _Row, prompt: str = "") -> Problem:
    """Parse a row."""
    columns = {**data, **({"prompt": prompt} if prompt and "prompt" not in data else {})}
    for needed, read in _FORMATS:
        if all(columns.get(name) is not None for name in needed):
            return read(columns)
    known = "; ".join(", ".join(needed) for needed, _ in _FORMATS)
    there = ", ".join(map(repr, columns)) or "nothing"
    raise TaskError(
        f"this row has no known format of code tasks: its columns are {there}, and the formats have {known}"
    )


def row(record: _Row) -> dict[str, Any]:
    """Return the task columns of a published row: the target of ``map: turnwise.ext.environments.code:row``."""
    problem = problem_of(record)
    name = next((record[key] for key in _IDS if record.get(key) is not None), record.get("id"))
    held = {key: value for key, value in record.items() if key not in ("id", "prompt", "data", "env", "agent")}
    opening = record.get("prompt")
    if isinstance(opening, str):
        held["code_prompt"] = opening
    return {"id": None if name is None else str(name), "prompt": asked(problem, record), **held}


_IDS: Final = ("task_id", "question_id", "problem_id", "name")


def asked(problem: Problem, record: _Row) -> str:
    """Return the question of a row."""
    if problem.format == "humaneval":
        return f"Complete this Python function.\n\n```python\n{problem.opening.rstrip()}\n```"
    texts = (record.get(name) for name in ("question_content", "question", "text", "description", "prompt"))
    parts = [next((text for text in texts if isinstance(text, str) and text.strip()), "").strip()]
    if problem.starter.strip():
        parts.append(f"Go on from this code:\n\n```python\n{problem.starter.rstrip()}\n```")
    if problem.kind == "programs":
        parts.append("Write a Python program that reads the standard input and writes the standard output.")
    if problem.format == "mbpp":
        shown_tests = problem.asserts.tests[: len(problem.asserts.tests) - problem.asserts.hidden]
        if shown_tests:
            parts.append("Your code must pass these tests:\n\n```python\n" + "\n".join(shown_tests) + "\n```")
    open_cases = [case for case in problem.cases if not case.hidden]
    if open_cases and problem.kind == "programs" and "input" not in parts[0].lower():
        parts += [f"Input:\n{case.given}\nOutput:\n{case.wanted}" for case in open_cases]
    return "\n\n".join(part for part in parts if part)


def _humaneval(data: _Row) -> Problem:
    opening, check, entry = (
        _text(data, "code_prompt" if "code_prompt" in data else "prompt"),
        _text(data, "test"),
        _text(data, "entry_point"),
    )
    body = data.get("canonical_solution")
    reference = f"{opening}{body}" if isinstance(body, str) and body.strip() else None
    prelude = finished(opening)
    if not prelude:
        raise TaskError(f"column 'prompt' is {shown(opening)}: it must begin a function, as HumanEval's rows do")
    asserts = Asserts(check=_parsed(check, "test"), prelude=prelude)
    return Problem("asserts", "humaneval", entry, opening, opening, asserts=asserts, reference=reference)


def _mbpp(data: _Row) -> Problem:
    tests = _texts(data, "test_list")
    hidden = _texts(data, "challenge_test_list") if data.get("challenge_test_list") is not None else ()
    setup = "\n".join([*_texts_or_none(data, "test_imports"), str(data.get("test_setup_code") or "")]).strip()
    reference = data.get("code")
    imports = _imports(str(reference or ""))
    every = tuple(_parsed(test, "test_list") for test in (*tests, *hidden))
    asserts = Asserts(tuple(f"{setup}\n{test}" if setup else test for test in every), "", "", imports, len(hidden))
    if not every:
        raise TaskError("column 'test_list' is empty: an answer could not be graded")
    entry = _called(every)
    return Problem("asserts", "mbpp", entry, asserts=asserts, reference=reference)


def _livecodebench(data: _Row) -> Problem:
    shown_cases = _tests(data, "public_test_cases", hidden=False)
    hidden_cases = _tests(data, "private_test_cases", hidden=True) if data.get("private_test_cases") else []
    found = [*shown_cases, *hidden_cases]
    metadata = _json(data, "metadata") if data.get("metadata") else {}
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    starter = str(data.get("starter_code") or "")
    reference = data.get("solution") or data.get("code")
    kinds = {str(kind) for kind, _ in found}
    if not found:
        raise TaskError("column 'public_test_cases' is empty, and 'private_test_cases' too: an answer cannot be graded")
    if kinds == {"functional"}:
        if not isinstance(name, str) or not name:
            raise TaskError("column 'metadata' has no 'func_name', which tests of the kind 'functional' call")
        cases = tuple(_call(case) for _, case in found)
        return Problem("calls", "livecodebench", _member(name, starter), "", starter, cases, reference=reference)
    if not kinds <= set(_STDIN):
        raise TaskError(f"column 'public_test_cases': testtype is {', '.join(sorted(kinds))}: stdin or functional")
    cases = tuple(case for _, case in found)
    return Problem("programs", "livecodebench", "", "", starter, cases, reference=reference)


def _apps(data: _Row) -> Problem:
    column = "input_output" if data.get("input_output") is not None else "tests"
    given = _json(data, column)
    if isinstance(given, list):
        given = {
            "inputs": [each.get("input") for each in given],
            "outputs": [each.get("output") for each in given],
            "fn_name": next((each["fn_name"] for each in given if each.get("fn_name")), None),
        }
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise TaskError(f"column {column!r} needs 'inputs' and 'outputs', non-empty lists of the same length")
    name, starter = given.get("fn_name"), str(data.get("starter_code") or "")
    reference = _first_solution(data)
    if name:
        # A result is in a list of one there.
        pairs = [
            (each, out[0] if isinstance(out, list) and len(out) == 1 else out)
            for each, out in zip(inputs, outputs, strict=True)
        ]
        cases = tuple(Case(tuple(each) if isinstance(each, list) else (each,), out) for each, out in pairs)
        code = f"{starter}\n{reference or ''}"
        return Problem("calls", "apps", _member(str(name), code), "", starter, cases, reference=reference)
    cases = tuple(Case(_stdio(one), _stdio(other)) for one, other in zip(inputs, outputs, strict=True))
    return Problem("programs", "apps", "", "", starter, cases, reference=reference)


def _contests(data: _Row) -> Problem:
    cases: list[Case] = []
    for column in ("public_tests", "private_tests", "generated_tests"):
        given = data.get(column) or {}
        pairs = zip(given.get("input", ()), given.get("output", ()), strict=True)
        cases += [Case(str(one), str(other), column != "public_tests") for one, other in pairs]
    if not cases:
        raise TaskError("column 'public_tests' is empty, and the other tests too: an answer cannot be graded")
    limit = data.get("time_limit")
    seconds = float(limit["seconds"]) if isinstance(limit, Mapping) and limit.get("seconds") else None
    return Problem("programs", "code_contests", cases=tuple(cases), seconds=seconds, reference=_first_solution(data))


_FORMATS: Final[tuple[tuple[tuple[str, ...], Callable[[_Row], Problem]], ...]] = (
    (("test", "entry_point", "prompt"), _humaneval),
    (("test_list",), _mbpp),
    (("public_test_cases",), _livecodebench),
    (("input_output",), _apps),
    (("public_tests",), _contests),
    (("tests",), _apps),
)


def _text(data: _Row, name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"column {name!r} is {shown(value)}: it must be a non-empty string")
    return value


def _texts(data: _Row, name: str) -> tuple[str, ...]:
    value = data.get(name)
    # Columnar files give arrays.
    listed = list(value) if value is not None and not isinstance(value, (str, bytes, Mapping)) else None
    if listed is None or not all(isinstance(each, str) for each in listed):
        raise TaskError(f"column {name!r} is {shown(value)}: it must be a list of strings")
    return tuple(listed)


def _texts_or_none(data: _Row, name: str) -> tuple[str, ...]:
    return () if data.get(name) is None else _texts(data, name)


def _json(data: _Row, name: str) -> Any:
    value = data.get(name)
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise TaskError(f"column {name!r} is {shown(value)}, which is not JSON: {error}") from error


def _tests(data: _Row, name: str, *, hidden: bool) -> list[tuple[str, Case]]:
    value = data.get(name)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = _unpacked(value, name)
    listed = _json({name: value}, name)
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        raise TaskError(f"column {name!r} is {shown(listed)}: it must be a list of objects with 'input' and 'output'")
    return [
        (str(each.get("testtype", "stdin")), Case(str(each.get("input", "")), str(each.get("output", "")), hidden))
        for each in listed
    ]


class _TextOnly(pickle.Unpickler):
    """Unpickler of texts that refuses everything executable."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not text")


def _unpacked(value: str, name: str) -> str:
    """Return the JSON of tests packed by LiveCodeBench: base64 of zlib of a pickled text."""
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(value), _MOST_UNPACKED)
        found = _TextOnly(io.BytesIO(data)).load()
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError, IndexError, KeyError) as error:
        raise TaskError(f"column {name!r} is neither JSON nor a packed text: {error}") from error
    if not isinstance(found, (str, bytes)):
        raise TaskError(f"column {name!r} holds {shown(found)}: it must be a string")
    return found if isinstance(found, str) else found.decode()


def _call(case: Case) -> Case:
    try:
        given = tuple(json.loads(line) for line in str(case.given).split("\n") if line.strip())
        return Case(given, json.loads(str(case.wanted)), case.hidden)
    except ValueError as error:
        raise TaskError(f"a test of the kind 'functional' is not JSON: {shown(case.given)}: {error}") from error


def _stdio(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _member(name: str, code: str) -> str:
    """Return the call form of a function: as a method, where the code defines a class Solution."""
    return f"Solution.{name}" if re.search(r"^\s*class Solution\b", code, re.MULTILINE) else name


def _first_solution(data: _Row) -> str | None:
    found = data.get("solutions")
    if isinstance(found, str) and found.strip():
        found = _json(data, "solutions")
    if isinstance(found, Mapping):
        found = found.get("solution")
    listed = [each for each in found if isinstance(each, str)] if isinstance(found, (list, tuple)) else []
    return listed[0] if listed else data.get("solution")


def _parsed(code: str, name: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError as error:
        raise TaskError(f"column {name!r} has a test that is not Python: {shown(code)}: {error}") from error
    return code


def _imports(code: str) -> tuple[str, ...]:
    """Return the top-level imports of a reference, which its tests rely on."""
    try:
        nodes = ast.parse(code).body
    except SyntaxError:
        return ()
    return tuple(ast.unparse(node) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))


def _called(tests: tuple[str, ...]) -> str:
    for test in tests:
        calls = [node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
        for function in calls:
            if isinstance(function, ast.Name) and not hasattr(builtins, function.id):
                return function.id
    return ""
