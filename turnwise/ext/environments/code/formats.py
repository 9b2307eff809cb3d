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
from turnwise.ext.environments.code.answers import complete_head
from turnwise.ext.environments.code.problems import Asserts, Case, Problem

_MOST_UNPACKED: Final = 512 * 2**20
_STDIN: Final = ("stdin", "stdin_stdout", "")
_Row = Mapping[str, Any]


def problem_of(data: _Row, prompt: str = "") -> Problem:
    """Return the problem of a dataset row, whose columns decide the format."""
    columns = {**data, **({"prompt": prompt} if prompt and "prompt" not in data else {})}
    for needed, read in _FORMATS:
        if all(columns.get(name) is not None for name in needed):
            return read(columns)
    formats = "; ".join(", ".join(required) for required, _ in _FORMATS)
    present = ", ".join(map(repr, columns)) or "nothing"
    raise TaskError(
        f"this row has no known format of code tasks: its columns are {present}, and the formats have {formats}"
    )


def row(record: _Row) -> dict[str, Any]:
    """Return the task columns of a published row: the target of ``map: turnwise.ext.environments.code:row``."""
    problem = problem_of(record)
    name = next((record[key] for key in _IDS if record.get(key) is not None), record.get("id"))
    columns = {key: value for key, value in record.items() if key not in ("id", "prompt", "data", "env", "agent")}
    opening = record.get("prompt")
    if isinstance(opening, str):
        columns["code_prompt"] = opening
    return {"id": None if name is None else str(name), "prompt": question_of(problem, record), **columns}


_IDS: Final = ("task_id", "question_id", "problem_id", "name")


def question_of(problem: Problem, record: _Row) -> str:
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
        parts += [f"Input:\n{case.input}\nOutput:\n{case.expected}" for case in open_cases]
    return "\n\n".join(part for part in parts if part)


def _humaneval(data: _Row) -> Problem:
    opening, check, entry = (
        _text(data, "code_prompt" if "code_prompt" in data else "prompt"),
        _text(data, "test"),
        _text(data, "entry_point"),
    )
    body = data.get("canonical_solution")
    reference = f"{opening}{body}" if isinstance(body, str) and body.strip() else None
    prelude = complete_head(opening)
    if not prelude:
        raise TaskError(f"column 'prompt' is {shown(opening)}: it must begin a function, as HumanEval's rows do")
    asserts = Asserts(check=_require_python(check, "test"), prelude=prelude)
    return Problem("asserts", "humaneval", entry, opening, opening, asserts=asserts, reference=reference)


def _mbpp(data: _Row) -> Problem:
    tests = _texts(data, "test_list")
    hidden = _texts(data, "challenge_test_list") if data.get("challenge_test_list") is not None else ()
    setup = "\n".join([*_texts_or_none(data, "test_imports"), str(data.get("test_setup_code") or "")]).strip()
    reference = data.get("code")
    imports = _imports(str(reference or ""))
    all_tests = tuple(_require_python(test, "test_list") for test in (*tests, *hidden))
    asserts = Asserts(tuple(f"{setup}\n{test}" if setup else test for test in all_tests), "", "", imports, len(hidden))
    if not all_tests:
        raise TaskError("column 'test_list' is empty: an answer could not be graded")
    entry = _called_function(all_tests)
    return Problem("asserts", "mbpp", entry, asserts=asserts, reference=reference)


def _livecodebench(data: _Row) -> Problem:
    shown_cases = _test_cases(data, "public_test_cases", hidden=False)
    hidden_cases = _test_cases(data, "private_test_cases", hidden=True) if data.get("private_test_cases") else []
    cases_by_kind = [*shown_cases, *hidden_cases]
    metadata = _json(data, "metadata") if data.get("metadata") else {}
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    starter = str(data.get("starter_code") or "")
    reference = data.get("solution") or data.get("code")
    kinds = {str(kind) for kind, _ in cases_by_kind}
    if not cases_by_kind:
        raise TaskError("column 'public_test_cases' is empty, and 'private_test_cases' too: an answer cannot be graded")
    if kinds == {"functional"}:
        if not isinstance(name, str) or not name:
            raise TaskError("column 'metadata' has no 'func_name', which tests of the kind 'functional' call")
        cases = tuple(_functional_case(case) for _, case in cases_by_kind)
        return Problem("calls", "livecodebench", _call_name(name, starter), "", starter, cases, reference=reference)
    if not kinds <= set(_STDIN):
        raise TaskError(f"column 'public_test_cases': testtype is {', '.join(sorted(kinds))}: stdin or functional")
    cases = tuple(case for _, case in cases_by_kind)
    return Problem("programs", "livecodebench", "", "", starter, cases, reference=reference)


def _apps(data: _Row) -> Problem:
    column = "input_output" if data.get("input_output") is not None else "tests"
    tests = _json(data, column)
    if isinstance(tests, list):
        tests = {
            "inputs": [test.get("input") for test in tests],
            "outputs": [test.get("output") for test in tests],
            "fn_name": next((test["fn_name"] for test in tests if test.get("fn_name")), None),
        }
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise TaskError(f"column {column!r} needs 'inputs' and 'outputs', non-empty lists of the same length")
    name, starter = tests.get("fn_name"), str(data.get("starter_code") or "")
    reference = _first_solution(data)
    if name:
        # APPS wraps each expected result in a list of one element.
        pairs = [
            (arguments, out[0] if isinstance(out, list) and len(out) == 1 else out)
            for arguments, out in zip(inputs, outputs, strict=True)
        ]
        cases = tuple(
            Case(tuple(arguments) if isinstance(arguments, list) else (arguments,), out) for arguments, out in pairs
        )
        code = f"{starter}\n{reference or ''}"
        return Problem("calls", "apps", _call_name(str(name), code), "", starter, cases, reference=reference)
    cases = tuple(Case(_stdio_text(one), _stdio_text(other)) for one, other in zip(inputs, outputs, strict=True))
    return Problem("programs", "apps", "", "", starter, cases, reference=reference)


def _code_contests(data: _Row) -> Problem:
    cases: list[Case] = []
    for column in ("public_tests", "private_tests", "generated_tests"):
        tests = data.get(column) or {}
        pairs = zip(tests.get("input", ()), tests.get("output", ()), strict=True)
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
    (("public_tests",), _code_contests),
    (("tests",), _apps),
)


def _text(data: _Row, name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"column {name!r} is {shown(value)}: it must be a non-empty string")
    return value


def _texts(data: _Row, name: str) -> tuple[str, ...]:
    value = data.get(name)
    # Columnar file formats yield arrays.
    texts = list(value) if value is not None and not isinstance(value, (str, bytes, Mapping)) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise TaskError(f"column {name!r} is {shown(value)}: it must be a list of strings")
    return tuple(texts)


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


def _test_cases(data: _Row, name: str, *, hidden: bool) -> list[tuple[str, Case]]:
    value = data.get(name)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = _unpack_cases(value, name)
    records = _json({name: value}, name)
    if not isinstance(records, list) or not all(isinstance(record, Mapping) for record in records):
        raise TaskError(f"column {name!r} is {shown(records)}: it must be a list of objects with 'input' and 'output'")
    return [
        (
            str(record.get("testtype", "stdin")),
            Case(str(record.get("input", "")), str(record.get("output", "")), hidden),
        )
        for record in records
    ]


class _TextUnpickler(pickle.Unpickler):
    """Unpickler of texts that refuses everything executable."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not text")


def _unpack_cases(value: str, name: str) -> str:
    """Return the JSON of tests packed by LiveCodeBench: base64 of zlib of a pickled text."""
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(value), _MOST_UNPACKED)
        text = _TextUnpickler(io.BytesIO(data)).load()
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError, IndexError, KeyError) as error:
        raise TaskError(f"column {name!r} is neither JSON nor a packed text: {error}") from error
    if not isinstance(text, (str, bytes)):
        raise TaskError(f"column {name!r} holds {shown(text)}: it must be a string")
    return text if isinstance(text, str) else text.decode()


def _functional_case(case: Case) -> Case:
    try:
        arguments = tuple(json.loads(line) for line in str(case.input).split("\n") if line.strip())
        return Case(arguments, json.loads(str(case.expected)), case.hidden)
    except ValueError as error:
        raise TaskError(f"a test of the kind 'functional' is not JSON: {shown(case.input)}: {error}") from error


def _stdio_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call_name(name: str, code: str) -> str:
    """Return the qualified name of a function: a method's, where the code defines a class Solution."""
    return f"Solution.{name}" if re.search(r"^\s*class Solution\b", code, re.MULTILINE) else name


def _first_solution(data: _Row) -> str | None:
    solutions = data.get("solutions")
    if isinstance(solutions, str) and solutions.strip():
        solutions = _json(data, "solutions")
    if isinstance(solutions, Mapping):
        solutions = solutions.get("solution")
    texts = [text for text in solutions if isinstance(text, str)] if isinstance(solutions, (list, tuple)) else []
    return texts[0] if texts else data.get("solution")


def _require_python(code: str, name: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError as error:
        raise TaskError(f"column {name!r} has a test that is not Python: {shown(code)}: {error}") from error
    return code


def _imports(code: str) -> tuple[str, ...]:
    """Return the top-level imports of a reference solution, which its tests rely on."""
    try:
        nodes = ast.parse(code).body
    except SyntaxError:
        return ()
    return tuple(ast.unparse(node) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))


def _called_function(tests: tuple[str, ...]) -> str:
    """Return the first function that tests call and that is no built-in; empty for none."""
    for test in tests:
        calls = [node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
        for function in calls:
            if isinstance(function, ast.Name) and not hasattr(builtins, function.id):
                return function.id
    return ""
