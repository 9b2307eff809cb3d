"""The environment ``code`` without a sandbox: rows as they are published, answers, comparisons, values on the wire."""

from __future__ import annotations

import base64
import collections
import decimal
import fractions
import json
import math
import pickle
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.envs.registration import make
from turnwise.errors import ConfigError, TaskError
from turnwise.ext.environments.code import problem_of, row
from turnwise.ext.environments.code.answers import code_of, program_of, same_output, same_value
from turnwise.ext.environments.code.builtin import BUILTIN_PROBLEMS, FORMATS, rows, task_from_seed, tasks
from turnwise.ext.environments.code.inside.wire import decode, encode
from turnwise.tasks import Task

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=4)
    | st.decimals(allow_nan=False, places=2) | st.fractions() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner)
    | st.frozensets(st.integers(), max_size=3) | st.sets(st.text(max_size=2), max_size=3),
    max_leaves=8,
)  # fmt: skip


def decode_peer_value(form: Any) -> Any:
    """What the process of the tests makes of a form, or that of the solution."""
    return decode(form, lambda tag, number: pytest.fail(f"{tag} {number}"))


@settings(max_examples=examples(15), deadline=None)
@given(PLAIN)
def test_values_keep_their_kind_and_value_on_the_wire(value: Any) -> None:
    decoded = decode_peer_value(json.loads(json.dumps(encode(value))))
    assert decoded == value
    assert type(decoded) is type(value)


def test_values_without_plain_form_are_converted_or_refused() -> None:
    class Equal(list):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    decoded = decode_peer_value(encode(Equal([1])))
    assert type(decoded) is list
    assert decoded != [2]
    assert decode_peer_value(encode(collections.Counter("aab"))) == {"a": 2, "b": 1}
    assert decode_peer_value(encode(range(1, 9, 2))) == range(1, 9, 2)
    assert math.isnan(decode(encode(math.nan)))
    with pytest.raises(TypeError, match="cannot leave"):
        encode(object())
    for form in ({"o": 0}, {"p": 0}, {"x": 1}, {"t": [], "s": []}, {}):
        with pytest.raises(ValueError, match=r"value|remote object"):
            decode(form)
    assert decode_peer_value(encode(decimal.Decimal("1.10"))).as_tuple().exponent == -2
    assert decode_peer_value(encode(fractions.Fraction(2, 6))) == fractions.Fraction(1, 3)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_that_ship_are_read_as_they_are_published(form: str) -> None:
    for builtin, record in zip(BUILTIN_PROBLEMS, rows(form), strict=True):
        problem = problem_of(record)
        assert problem.reference
        task = Task.from_record(row(record), default_id="x")
        assert builtin.text in str(task.prompt)
        reparsed = problem_of(task.data, str(task.prompt))
        assert (reparsed.kind, reparsed.cases, reparsed.asserts) == (problem.kind, problem.cases, problem.asserts)
        hidden = builtin.cases[-1][1]
        if form != "humaneval" and isinstance(hidden, (list, dict)) and hidden:
            assert str(hidden) not in str(task.prompt)
    assert len(list(tasks(format=form))) == 12
    assert task_from_seed(3).id == task_from_seed(3).id


def test_packed_tests_of_livecodebench_are_read_and_nothing_else_is_unpickled() -> None:
    record = rows("stdin")[0]
    packed = base64.b64encode(zlib.compress(pickle.dumps(record["private_test_cases"]))).decode()
    assert problem_of({**record, "private_test_cases": packed}).cases == problem_of(record).cases

    class Bad:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    for wrong in (base64.b64encode(zlib.compress(pickle.dumps(Bad()))).decode(), "!!!", "AAAA"):
        with pytest.raises(TaskError, match="column 'private_test_cases' is neither JSON nor a packed text"):
            problem_of({**record, "private_test_cases": wrong})


def test_apps_code_contests_and_sanitized_rows_are_read() -> None:
    apps = problem_of({"question": "q", "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})})
    assert (apps.kind, apps.cases[0].input) == ("programs", "1\n")
    called = {"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "f"}
    apps = problem_of({"question": "q", "input_output": called, "starter_code": "class Solution:\n  def f(self):"})
    assert (apps.entry, apps.cases[0].input, apps.cases[0].expected) == ("Solution.f", (1, [2]), 3)
    listed = [{"input": "1", "output": "2", "type": "stdin_stdout"}]
    assert problem_of({"prompt": "p", "tests": json.dumps(listed)}).cases[0].expected == "2"
    contest = {"description": "d", "public_tests": {"input": ["1"], "output": ["2"]}, "time_limit": {"seconds": 3}}
    assert problem_of(contest).seconds == 3
    sanitized = problem_of({"prompt": "p", "test_imports": ["import math"], "test_list": ["assert f(1) == 1"]})
    assert sanitized.entry == "f"
    assert sanitized.asserts.tests == ("import math\nassert f(1) == 1",)


@pytest.mark.parametrize(
    ("record", "refusal"),
    [
        ({"question": "q"}, "no known format of code tasks: its columns are 'question'"),
        ({"test_list": []}, "'test_list' is empty"),
        ({"test_list": ["assert ("]}, "'test_list' has a test that is not Python"),
        ({"test_list": "assert f()"}, "'test_list' is 'assert f\\(\\)': it must be a list"),
        ({"prompt": "def (", "test": "x = 1", "entry_point": "f"}, "column 'prompt'"),
        ({"input_output": "{"}, "which is not JSON"),
        ({"input_output": {"inputs": [1], "outputs": []}}, "non-empty lists of the same length"),
        ({"public_test_cases": '[{"input": "1", "output": "2", "testtype": "functional"}]'}, "no 'func_name'"),
    ],
)
def test_malformed_rows_raise_task_error(record: dict[str, Any], refusal: str) -> None:
    with pytest.raises(TaskError, match=refusal):
        problem_of(record)


def test_code_and_program_of_an_answer() -> None:
    assert code_of("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```\n") == "y = 2"
    assert code_of("```python\nx = 1\n```\n```bash\nls\n```") == "x = 1"
    assert code_of("```py\ncut off") == "cut off"
    assert code_of("def f(): pass") == "def f(): pass"
    assert code_of("````\n```\nx\n````") == "```\nx"
    assert code_of("") == ""
    problem = problem_of(rows("humaneval")[3])
    assert "PAIRS" in problem.opening
    function = program_of(problem, "def balanced(text):\n    return True")
    assert function.startswith("PAIRS")
    body = program_of(problem, "return True")
    for program in (function, body):
        names: dict[str, Any] = {}
        exec(program, names)
        assert names["balanced"]("(") is True
    assert program_of(problem, "  \n") == ""


def test_outputs_and_values_are_compared_as_the_datasets_do() -> None:
    assert same_output("1 2 \n3\n\n", "1 2\n3")
    assert same_output("1.0 x", "1 x")
    assert not same_output("1.001", "1")
    assert same_output("1.001", "1", 0.01)
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output("nan", "1", 1.0)
    assert not same_output("", "0")
    assert same_value((1, [2.0]), [1, [2]])
    assert not same_value(True, 1)
    assert not same_value(None, False)
    assert not same_value("1", 1)
    assert same_value({1: "a"}, {"1": "a"})
    assert not same_value([1], [1, 2])
    assert not same_value(10**400, 1.0, 0.1)


def test_invalid_settings_raise_config_error() -> None:
    for config in ({"time_limit": 0}, {"memory": -1}, {"memory": 1.5}, {"tolerance": -1}):
        with pytest.raises(ConfigError, match=next(iter(config))):
            make("code", **config)
