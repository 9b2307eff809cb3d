"""Contradictory twins: how test files are rewritten, and what of a run's statuses is a contradiction."""

from __future__ import annotations

import ast
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.ext.environments.swe import tasks
from turnwise.ext.environments.swe.checks import EXCEPTION, REVERSED, Edit, alterations, checks_of
from turnwise.ext.environments.swe.contradictions import (
    ROUNDS,
    ConfirmationRun,
    Suspect,
    find_suspects,
    findings,
    rounds,
)
from turnwise.ext.environments.swe.logs import TestStatus, pytest_log
from turnwise.ext.environments.swe.rows import instance_of
from turnwise.ext.environments.swe.snapshot import CachedTwins
from turnwise.ext.environments.swe.twins import Family, Roll, TestFile, TwinPlan, command_obstacle, enroll, select
from turnwise.ext.environments.swe.validation import PlanCache

PASSED, FAILED = TestStatus.PASSED, TestStatus.FAILED
SUITE = '''
"""A suite of every kind of test."""
import asyncio, unittest
import pytest
from unittest import TestCase

def money(units): return ("money", units)

@pytest.fixture
def three(): return 3

def test_value(three):
    """It is 3."""
    assert three == 3, "three is 3"

@pytest.mark.parametrize("a, want", [(1, 2), (3, 4), pytest.param(5, 6, id="five")])
def test_cases(a, want):
    assert a + 1 == want

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("a", ["x", "y z"])
def test_marks(a): assert a in "x, y z"

def test_raises():
    with pytest.raises(ValueError) as caught:
        int("x")
    assert "invalid" in str(caught.value)

def test_made(): assert money(3) == money(3)
def test_names(): assert callable(test_named)
def test_named(): pass
@pytest.mark.xfail
def test_expected_to_fail(): assert 1 == 2
def test_early():
    if money(1): return
    assert 1 == 2

class TestPlain:
    def test_value(self, three): assert not three == 4
    def test_other(self): assert [1, "a"] == list((1, "a"))

class Case(TestCase):
    def setUp(self): self.seven = 7
    def test_equal(self): self.assertEqual(self.seven, 7)
    def test_truth(self): self.assertTrue(self.seven)
    def test_raises(self):
        with self.assertRaises(KeyError): {}["x"]

class Async(unittest.IsolatedAsyncioTestCase):
    async def test_value(self):
        await asyncio.sleep(0)
        assert (await asyncio.sleep(0, 5)) == 5

class Base(TestCase):
    def test_kept(self): pass
class Derived(Base):
    def test_kept(self): assert True
'''


def families_of(file: TestFile, limit: int = 3) -> list[Family]:
    rng = random.Random(1)
    families = []
    for test, function in file.tests.items():
        options = alterations(function, limit, rng, makers=file.makers)
        if options:
            cases = {"test_cases": ("[1-2]", "[3-4]", "[five]"), "test_marks": ("[x]", "[y z]")}.get(test, ("",))
            option = options[0]
            families.append(
                Family(file.path, test, option.kind, tuple(option.twins), option.reversal, cases, option.rows)
            )
    return families


def outcomes(text: str, folder: Path) -> dict[str, TestStatus]:
    (folder / "test_suite.py").write_text(text, "utf-8")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:randomly", "test_suite.py"]
    # The plug-ins of this environment take longer to import than the suite to run.
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    statuses = dict(re.findall(r"^(test_suite.py::.*?) (PASSED|FAILED|ERROR|XFAIL)\s", done.stdout, re.MULTILINE))
    assert statuses, done.stdout + done.stderr
    return {name: TestStatus(status) for name, status in statuses.items()}


def test_a_suite_of_every_kind_passes_beside_twins_that_fail(tmp_path: Path) -> None:
    file = TestFile("test_suite.py", SUITE)
    original = outcomes(SUITE, tmp_path)
    families = families_of(file)
    assert {family.test for family in families} == {
        *("test_value", "test_cases", "test_marks", "test_raises", "test_made", "test_names", "TestPlain::test_value"),
        *("TestPlain::test_other", "Case::test_equal", "Case::test_truth", "Case::test_raises", "Async::test_value"),
    }
    roll = Roll()
    statuses = outcomes(enroll(file, families, random.Random(2), roll), tmp_path)
    tests, twins = roll.read(statuses)
    assert tests == original
    assert set(twins.values()) == {FAILED}
    expected = {
        (family.node(case), twin) for family in families for case in family.cases for twin in range(len(family.twins))
    }
    assert set(twins) == expected
    assert roll.read(pytest_log(""))[0] == {}


def test_a_test_and_its_twins_look_alike() -> None:
    file = TestFile("test_suite.py", SUITE)
    roll = Roll()
    text = enroll(file, families_of(file), random.Random(2), roll)
    assert all(re.fullmatch(r"test_[0-9a-f]{16}", name) for name in (*roll.members, *roll.names))
    assert not [hint for hint in ("It is 3", "three is 3", "test_value") if hint in text]
    shapes: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(text)):
        member = roll.members.get(node.name) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
        if member is not None and member.family.kind in ("value", "made"):
            for constant in ast.walk(node):
                if isinstance(constant, ast.Constant):
                    constant.value = type(constant.value).__name__
            node.name = ""
            shapes.setdefault(member.family.test, set()).add(ast.dump(node))
    assert len(shapes) >= 6
    assert {len(dumps) for dumps in shapes.values()} == {1}
    second_roll = Roll()
    enroll(file, families_of(file), random.Random(2), second_roll)
    assert not set(roll.members) & set(second_roll.members)


literals = st.one_of(
    st.integers(-1000, 1000),
    st.text("abcXYZ059 -<", max_size=6),
    st.booleans(),
    st.floats(-50, 50, allow_nan=False),
    st.binary(max_size=4),
)
values = st.recursive(
    literals, lambda inner: st.lists(inner, min_size=1, max_size=4) | st.tuples(inner, inner), max_leaves=6
)


@given(values, values, st.randoms(use_true_random=False), st.booleans())
def test_no_program_passes_two_of_a_family(expected: Any, got: Any, rng: random.Random, right: bool) -> None:
    file = TestFile("t.py", f"def test_a():\n    assert f() == {expected!r}\n")
    option = alterations(file.tests["test_a"], 15, rng)[0]
    family = Family("t.py", "test_a", option.kind, tuple(option.twins), option.reversal)
    roll = Roll()
    names: dict[str, Any] = {"f": lambda: expected if right else got}
    exec(enroll(file, [family], rng, roll), names)
    passed = [member.twin for name, member in roll.members.items() if passes(names[name])]
    assert len(passed) <= 1
    if right:
        assert passed == [-1]


def passes(function: Any) -> bool:
    try:
        function()
    except AssertionError:
        return False
    return True


@given(st.integers(0, 200), st.randoms(use_true_random=False))
def test_every_literal_of_a_family_draws_the_same_family(value: int, rng: random.Random) -> None:
    """From each of them the others can be drawn, and with the same odds."""

    def drawn(literal: int, limit: int) -> set[int]:
        function = TestFile("t.py", f"def test_a():\n    assert f() == [{literal}]\n").tests["test_a"]
        return {ast.literal_eval(twin[0].text) for twin in alterations(function, limit, rng)[0].twins}

    all_of_it = drawn(value, 99) | {value}
    assert {frozenset(drawn(literal, 99) | {literal}) for literal in all_of_it} == {frozenset(all_of_it)}


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_asserted_truths_are_reversed_together(signs: list[bool], got: list[bool]) -> None:
    lines = [f"    assert {'' if sign else 'not '}f({number})" for number, sign in enumerate(signs)]
    file = TestFile("t.py", "def test_a():\n" + "\n".join(lines) + "\n")
    option = alterations(file.tests["test_a"], 7, random.Random(3))[0]
    family = Family("t.py", "test_a", option.kind, tuple(option.twins), option.reversal)
    assert len(family.twins) == {1: 1, 2: 3}.get(len(signs), 7)
    roll = Roll()
    names: dict[str, Any] = {"f": got.__getitem__}
    exec(enroll(file, [family], random.Random(4), roll), names)
    assert sum(passes(names[name]) for name in roll.members) <= 1


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ("assert f() == 3", ["value"]),
        ("assert f() is True", ["value"]),
        ("assert f() is None", ["value"]),
        ("assert 3 == f()", ["value"]),
        ("assert f() == Money(3)", ["value"]),
        ("assert f() == g(3)", ["value"]),
        ("assert f() < 3", ["truth"]),
        ("with raises(ValueError):\n        f()", ["raises"]),
        ("for x in (1, 2):\n        assert f(x)", ["truth"]),
        ("for x in f():\n        assert x", []),
        ("if f():\n        assert 1", []),
        ("try:\n        assert f()\n    except ValueError: pass", []),
        ("with f():\n        assert 1", []),
        ("if f(): return\n    assert 1", []),
        ("assert f()\n    if f(): return\n    assert 1", ["truth"]),
        ("for x in (1, 2):\n        if x: break\n    assert f()", []),
        ("def g():\n        return 1\n    assert g()", ["truth"]),
        ("g = lambda: (yield)\n    assert g", ["truth"]),
    ],
)
def test_only_checks_that_every_passing_run_reaches_are_altered(body: str, kinds: list[str]) -> None:
    function = ast.parse(f"def test_a():\n    {body}\n").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert [check.kind for check in checks_of(function)] == kinds


@pytest.mark.parametrize(
    ("body", "kind", "leaf"),
    [
        ("assert f() == g(3)", "truth", REVERSED),
        ("assert f() == Money(3)", "made", 0),
        ("assert f() is None", "truth", REVERSED),
        ("assert f() == None", "truth", REVERSED),
        ("assert f() == ''", "truth", REVERSED),
        ("with raises(ValueError):\n        f()", "raises", EXCEPTION),
        ("with raises((ValueError, KeyError)):\n        f()", "raises", REVERSED),
        ("assert f(0)\n    assert f(1) == 3", "value", 0),
    ],
)
def test_first_alteration_of_a_check(body: str, kind: str, leaf: int) -> None:
    function = TestFile("t.py", f"def test_a():\n    {body}\n").tests["test_a"]
    option = alterations(function, 3, random.Random(0))[0]
    assert (option.kind, option.twins[0][0].leaf) == (kind, leaf)
    assert option.reversal[0].leaf == REVERSED


def test_the_check_that_fails_without_a_solution_comes_first() -> None:
    text = "def test_a():\n    assert f(0) == 1\n    assert f(1) == 2\n    assert f(2) == 3\n"
    function = TestFile("t.py", text).tests["test_a"]
    assert alterations(function, 3, random.Random(0), since=3)[0].twins[0][0].check == 1
    assert alterations(function, 3, random.Random(0), since=99)[0].twins[0][0].check == 0


def test_a_parameter_that_is_an_input_is_not_altered() -> None:
    text = "@mark.parametrize('a', [1, 2])\ndef test_a(a):\n    assert f(g(a)) == a\n"
    assert alterations(TestFile("t.py", text).tests["test_a"], 3, random.Random(0))[0].kind == "truth"
    assert alterations(TestFile("t.py", text.replace("f(g(a))", "f()")).tests["test_a"], 3, random.Random(0))[0].rows


@pytest.mark.parametrize("command", ["pytest -x", "pytest -vx", "pytest -k a", "pytest --maxfail=1", "pytest --lf"])
def test_commands_that_take_no_twins(command: str) -> None:
    assert "command" in command_obstacle(command, ("tests/test_a.py",))
    assert "command" in command_obstacle("pytest", ("-k", "a or b"))
    assert command_obstacle("python -m pytest -rA --tb=short -p no:cacheprovider -n0", ("tests/test_x.py",)) == ""


FAMILY = Family("t.py", "test_a", "value", (((),), ((),)), ())  # type: ignore[arg-type]
NODE = "t.py::test_a"


def seen(family: Family, real: TestStatus, twin: TestStatus, reversal: TestStatus = FAILED) -> list[ConfirmationRun]:
    suspect = Suspect(family, (NODE,), (0,))
    runs = []
    for members in rounds([suspect], random.Random(1)):
        index = members[0][1]
        status = {-1: real, 0: twin, 1: twin}.get(index, reversal)
        tests = {NODE: status} if index < 0 else {}
        runs.append(ConfirmationRun(dict(members), tests, {} if index < 0 else {(NODE, index): status}))
    assert len(runs) == ROUNDS
    return runs


@pytest.mark.parametrize(
    ("kind", "real", "twin", "reversal", "tampered"),
    [
        ("value", PASSED, FAILED, FAILED, None),
        ("value", PASSED, PASSED, FAILED, True),
        ("value", FAILED, PASSED, FAILED, False),
        ("truth", PASSED, PASSED, PASSED, True),
        ("made", PASSED, PASSED, FAILED, False),
        ("made", PASSED, PASSED, PASSED, True),
        ("raises", PASSED, PASSED, FAILED, None),
        ("raises", PASSED, PASSED, PASSED, True),
    ],
)
def test_suspect_is_judged_by_its_runs_in_separate_processes(
    kind: str, real: TestStatus, twin: TestStatus, reversal: TestStatus, tampered: bool | None
) -> None:
    family = Family("t.py", "test_a", kind, FAMILY.twins)
    results = findings([Suspect(family, (NODE,), (0,))], seen(family, real, twin, reversal))
    assert [finding.tampered for finding in results] == ([] if tampered is None else [tampered])
    if tampered:
        assert f"{NODE} passes together with its twin {NODE}~" in results[0].reason


def test_a_suspicion_needs_the_test_itself() -> None:
    twin = {(NODE, 1): PASSED}
    assert find_suspects([FAMILY], {NODE: PASSED}, twin, {NODE}) == [Suspect(FAMILY, (NODE,), (1,))]
    assert find_suspects([FAMILY], {NODE: FAILED}, twin, {NODE}) == []
    assert find_suspects([FAMILY], {NODE: PASSED}, twin, set()) == []
    assert find_suspects([FAMILY], {NODE: PASSED}, {(NODE, 1): FAILED}, {NODE}) == []


def test_names_of_a_run_are_put_back(tmp_path: Path) -> None:
    file = TestFile("t.py", "def test_a():\n    assert f() == 3\n")
    family = Family("t.py", "test_a", "value", tuple(alterations(file.tests["test_a"], 2, random.Random(0))[0].twins))
    roll = Roll()
    text = select(file, [(family, 1)], roll)
    assert "== 3" not in text
    name = next(iter(roll.members))
    assert roll.named(f"FAILED t.py::{name} - x") == "FAILED t.py::test_a~2 - x"
    plan = TwinPlan((family,), {"t.py": "0"}, ("x",), "")
    CachedTwins(TwinPlan).put("row", plan, tmp_path, in_memory=False)
    assert CachedTwins(TwinPlan).get("row", tmp_path) == plan


def test_only_a_plan_with_twins_outlasts_the_process(tmp_path: Path) -> None:
    """That a solution failed may be this machine's doing: it was too slow, say."""
    instance = replace(instance_of(next(tasks())), name="a row of its own")
    plans = PlanCache(tmp_path)
    none = TwinPlan(reason="its own solution does not resolve it")
    plans.put(instance, none)
    assert plans.get(instance) == none
    assert not (tmp_path / "twins").exists()
    plans.put(instance, TwinPlan((Family("t.py", "test_a", "truth", ((Edit(0, REVERSED),),)),), {"t.py": "0"}))
    [file] = (tmp_path / "twins").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
