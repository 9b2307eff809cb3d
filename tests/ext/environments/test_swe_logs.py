"""Logs of test runners, as the runners write them."""

from __future__ import annotations

import pytest

from turnwise.errors import ConfigError
from turnwise.ext.environments.swe.logs import PARSERS, TestStatus, parser_of

PYTEST = """\
============================= test session starts ==============================
collected 5 items

tests/test_a.py .Fsx                                                     [ 80%]
tests/test_b.py E                                                        [100%]

==================================== PASSES ====================================
____________________________________ test_ok ___________________________________
----------------------------- Captured stdout call -----------------------------
PASSED tests/test_a.py::test_bad
=========================== short test summary info ============================
PASSED tests/test_a.py::test_ok
PASSED tests/test_a.py::test_many[a b]
SKIPPED [1] tests/test_a.py:9: not here
XFAIL tests/test_a.py::test_later - reason: later
ERROR tests/test_b.py::test_setup - RuntimeError: no
FAILED tests/test_a.py::test_bad - assert 1 == 2
============ 1 failed, 2 passed, 1 skipped, 1 xfailed, 1 error in 0.05s ========
"""
VERBOSE = """\
tests/test_a.py::test_ok \x1b[32mPASSED\x1b[0m                                    [ 33%]
tests/test_a.py::TestA::test_many[a b] FAILED                            [ 66%]
tests/test_a.py::test_other SKIPPED (no reason)                          [100%]
"""
UNITTEST = """\
test_add (tests.test_a.TestA.test_add) ... ok
test_doc (tests.test_a.TestA.test_doc)
What it says. ... FAIL
test_print (tests.test_a.TestA) ... some output
of two lines
ok
test_skip (tests.test_a.TestA) ... skipped 'not here'
test_known (tests.test_a.TestA) ... expected failure

======================================================================
FAIL: test_doc (tests.test_a.TestA.test_doc)
What it says.
----------------------------------------------------------------------
ERROR: setUpClass (tests.test_b.TestB)
Ran 5 tests in 0.001s
"""
SYMPY = """\
sympy/core/tests/test_args.py[3]
test_one ok
test_two F
test_three E
test_four Skipped
_______ sympy/core/tests/test_args.py:test_two ________
"""
JEST = """\
PASS src/sum.test.js
  sum
    \u2713 adds numbers (3 ms)
    \u2715 adds texts
    \u25cb skipped waits
  1) hangs
"""
GO = """\
=== RUN   TestAdd
=== RUN   TestAdd/zero
    --- FAIL: TestAdd/zero (0.00s)
--- FAIL: TestAdd (0.01s)
--- PASS: TestSub (0.00s)
--- SKIP: TestNet (0.00s)
ok      example.org/sum 0.02s
{"Time":"2024-01-01T00:00:00Z","Action":"pass","Package":"example.org/x","Test":"TestJson","Elapsed":0}
{"Action":"pass","Package":"example.org/x"}
"""
CARGO = """\
running 3 tests
test tests::adds ... ok
test tests::panics - should panic ... ok
test tests::fails ... FAILED
test net::slow ... ignored, needs a network
test result: FAILED. 2 passed; 1 failed; 1 ignored
"""
P, F, E, S, X = "PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"


@pytest.mark.parametrize(
    ("framework", "log", "expected"),
    [
        (
            "pytest",
            PYTEST,
            {
                "tests/test_a.py::test_ok": P,
                "tests/test_a.py::test_many[a": P,
                "tests/test_a.py::test_later": X,
                "tests/test_b.py::test_setup": E,
                "tests/test_a.py::test_bad": F,
            },
        ),
        (
            "pytest",
            VERBOSE,
            {"tests/test_a.py::test_ok": P, "tests/test_a.py::TestA::test_many[a": F, "tests/test_a.py::test_other": S},
        ),
        (
            "unittest",
            UNITTEST,
            {
                "test_add (tests.test_a.TestA.test_add)": P,
                "test_doc (tests.test_a.TestA.test_doc)": F,
                "What it says.": F,
                "test_print (tests.test_a.TestA)": P,
                "test_skip (tests.test_a.TestA)": S,
                "test_known (tests.test_a.TestA)": X,
                "setUpClass (tests.test_b.TestB)": E,
            },
        ),
        (
            "sympy",
            SYMPY,
            {
                "test_one": P,
                "test_two": F,
                "test_three": E,
                "test_four": S,
                "sympy/core/tests/test_args.py:test_two": F,
            },
        ),
        ("jest", JEST, {"adds numbers": P, "adds texts": F, "waits": S, "hangs": F}),
        ("go", GO, {"TestAdd/zero": F, "TestAdd": F, "TestSub": P, "TestNet": S, "TestJson": P}),
        ("cargo", CARGO, {"tests::adds": P, "tests::panics": P, "tests::fails": F, "net::slow": S}),
    ],
)
def test_statuses(framework, log, expected):
    assert parser_of(framework)(log) == expected


@pytest.mark.parametrize("framework", PARSERS)
def test_any_text_is_read(framework):
    for log in ("", "\x00\n ... \n", PYTEST, UNITTEST, GO, "ok\n" * 3, '{"Test": 1}\n{"a"', "- \n 1) \n"):
        assert all(isinstance(status, TestStatus) for status in parser_of(framework)(log).values())


def test_printed_result_lines_are_not_results():
    forged = PYTEST.replace("PASSED tests/test_a.py::test_bad\n", "tests/test_a.py::test_bad PASSED\n" * 2)
    assert parser_of("pytest")(forged)["tests/test_a.py::test_bad"] == F


def test_an_unknown_framework():
    with pytest.raises(ConfigError, match="framework is 'nonesuch': supported are pytest, "):
        parser_of("nonesuch")
