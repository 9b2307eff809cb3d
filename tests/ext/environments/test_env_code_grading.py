"""The environment ``code`` judges answers in sandboxes, and nothing that an answer does makes it pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support.envs.code_cheats import FUNCTION_CHEATS, PROGRAM_CHEATS, rows
from support.envs.sandboxed_episodes import answered, called, fenced, some_boxes
from support.sandboxes.counting_manager import CountingManager
from turnwise.envs.core import close_env, reset_env
from turnwise.envs.solution import play_solution
from turnwise.errors import ConfigError, EnvError
from turnwise.ext.environments.code import CodeEnv, row
from turnwise.ext.environments.code.inside.wire import decode
from turnwise.sandboxes.manager import SandboxManager
from turnwise.tasks import Task

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes() -> AsyncIterator[CountingManager]:
    async with some_boxes() as manager:
        yield manager


def task_of(record: dict[str, Any]) -> Task:
    return Task.from_record(row(record), default_id="made")


def made(boxes: SandboxManager, **config: Any) -> CodeEnv:
    # This process's interpreter: a machine may have no other one.
    env = CodeEnv(**{"packages": True, "time_limit": 20.0, **config})
    env.sandboxes = boxes
    return env


async def graded(env: CodeEnv, record: dict[str, Any], code: str) -> float:
    result = await answered(env, task_of(record), fenced(code))
    await close_env(env)
    assert result.terminated
    return result.reward


@pytest.mark.parametrize("form", list(rows()))
async def test_reference_passes_and_an_empty_answer_does_not(boxes: SandboxManager, form: str) -> None:
    env = made(boxes)
    record = rows()[form]
    await reset_env(env, task_of(record), seed=0)
    reference = env.problem.reference
    assert await graded(env, record, reference or "") == 1.0
    assert env.report is not None
    assert [result.ok for result in env.report.results] == [True, True]
    assert await graded(env, record, "") == 0.0
    assert [result.ok for result in env.report.results] == [False, False]


CHEATS = [
    ("humaneval", FUNCTION_CHEATS, "exits with 0 when it is called"),
    ("humaneval", FUNCTION_CHEATS, "writes verdicts to every open file"),
    ("humaneval", FUNCTION_CHEATS, "returns an object equal to everything"),
    ("mbpp", FUNCTION_CHEATS, "returns something equal to everything"),
    ("functional", FUNCTION_CHEATS, "returns an object equal to everything"),
    ("stdin", PROGRAM_CHEATS, "ends its parent"),
]
"""All others, in all formats, run in tests/real."""


@pytest.mark.parametrize(("form", "cheats", "name"), CHEATS)
async def test_a_cheat_does_not_pass(boxes: SandboxManager, form: str, cheats: dict[str, str], name: str) -> None:
    assert await graded(made(boxes, partial=True), rows()[form], cheats[name]) == 0.0


@pytest.mark.parametrize("name", ["returns something equal to everything", "writes verdicts to every open file", ""])
async def test_no_answer_passes_a_test_together_with_its_twin(boxes: SandboxManager, name: str) -> None:
    record = rows()["mbpp"]
    twins = [f"{test}0" for test in record["test_list"]]
    code = FUNCTION_CHEATS[name] if name else record["code"]
    env = made(boxes, partial=True)
    await graded(env, {**record, "test_list": [*record["test_list"], *twins]}, code)
    assert env.report is not None
    passed = [result.ok for result in env.report.results]
    assert passed == ([False] * 4 if name else [True, True, False, False])


async def test_an_exception_of_the_answer_ends_no_loop_of_the_tests(boxes: SandboxManager) -> None:
    tests = [
        "assert all(map(add, [1], [2]))",
        "assert sum(map(add, [1], [2])) == 0",
        "assert not any(iter(lambda: add(1, 2), 3))",
    ]
    env = made(boxes, partial=True)
    for error in ("StopIteration", "StopAsyncIteration", "GeneratorExit"):
        assert await graded(env, {**rows()["mbpp"], "test_list": tests}, f"def add(a, b):\n    raise {error}\n") == 0.0
    items = "def add(a, b):\n    return iter(())\n"
    stops = "try:\n    next(add(1, 2))\n    assert False\nexcept StopIteration:\n    pass"
    assert await graded(env, {**rows()["mbpp"], "test_list": [stops]}, items) == 1.0


CONTAINS_ALL = """
class Whatever:
    def __contains__(self, item): return True
    def __iter__(self): return iter(())
def add(a, b): return Whatever()
"""


async def test_an_object_of_the_answer_is_not_asked_what_it_contains(boxes: SandboxManager) -> None:
    tests = ["assert 668 in add(417, 251)", "assert all(total in add(1, 2) for total in [3])"]
    record = {**rows()["mbpp"], "test_list": tests}
    env = made(boxes, partial=True)
    assert await graded(env, record, CONTAINS_ALL) == 0.0
    assert await graded(env, record, "def add(a, b):\n    return {a + b}\n") == 1.0


HASHED_ALIKE = {"d": [[{"i": hex(number * (2**61 - 1))}, 0] for number in range(1, 100)]}


async def test_this_process_computes_nothing_with_returned_values() -> None:
    """A fraction of large numbers, or whole numbers of one hash, would occupy it for hours."""
    assert {type(key) for key in decode(HASHED_ALIKE)} == {str}
    for form in ({"F": [3, 6]}, {"s": [1]}, {"r": [0, 3, 1]}, {"D": "1"}, {"t": [{"z": []}]}):
        with pytest.raises(ValueError, match="equals none of JSON"):
            decode(form)
    assert decode({"t": [{"d": [["a", {"f": "inf"}]]}, {"i": "0xff"}]}) == ({"a": float("inf")}, 255)


async def test_partial_credit_is_the_share_of_passed_tests(boxes: SandboxManager) -> None:
    env = made(boxes, partial=True)
    wrong = "def add(a, b):\n    print('noise')\n    return a + b if a < 500 else 0\n"
    assert await graded(env, rows()["functional"], wrong) == 0.5
    assert env.report is not None
    assert [(result.ok, result.hidden) for result in env.report.results] == [(True, False), (False, True)]
    assert await graded(made(boxes), rows()["mbpp"], wrong) == 0.0


@pytest.mark.long
async def test_a_test_that_takes_too_long_or_too_much_fails_alone(boxes: SandboxManager) -> None:
    env = made(boxes, partial=True, time_limit=1.0, memory=512)
    hangs = "def add(a, b):\n    while a > 500: pass\n    return a + b\n"
    assert await graded(env, rows()["humaneval"], hangs) == 0.5
    assert env.report is not None
    assert env.report.timeouts == 1
    assert "no result within 1 s" in env.report.results[1].error
    large = "def add(a, b):\n    return a + b if a < 500 else len(bytearray(2**30))\n"
    assert await graded(env, rows()["functional"], large) == 0.5
    assert "MemoryError" in env.report.results[1].error


HELPERS = '''
from collections import deque

def start(n):
    """A helper of the prompt."""
    return n + 1

def walk(values, visit):
    """Do several things."""
'''
TESTS = """
class Node:
    secret = 7
    def __init__(self, value): self.value, self._hidden = value, 99

def check(candidate):
    values = [3, 1, 2]
    assert candidate(values, lambda value: value * 2) == (start(1) * 3, 6.0)
    assert values == [1, 2, 3]
    made = make(5)
    assert made.size == 5 and len(made) == 5 and made[1] == 1 and list(made) == [0, 1, 2, 3, 4]
    assert math.isclose(look(Node(4)), 4.0)
    assert peek(Node(4)) == "PermissionError"
    try:
        fail()
        assert False
    except ZeroDivisionError as error:
        assert "by zero" in str(error)
    assert (huge() == 10 ** 5000) and type(huge()) is int
    assert make(1) != make(1)
"""
ANSWER = """
def walk(values, visit):
    values.sort()
    return (sum(values), float(visit(len(values))))
class Made:
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, at): return at
    def __iter__(self): return iter(range(self.size))
    def __eq__(self, other): return True
def make(size): return Made(size)
def look(node): return float(node.value)
def peek(node):
    try:
        return node._hidden
    except Exception as error:
        return type(error).__name__
def fail(): return 1 / 0
def huge(): return 10 ** 5000
"""


async def test_tests_may_use_helpers_objects_callbacks_and_changes_in_place(boxes: SandboxManager) -> None:
    record = {"prompt": HELPERS.lstrip("\n"), "entry_point": "walk", "test": TESTS, "canonical_solution": ""}
    env = made(boxes, partial=True)
    assert await graded(env, record, ANSWER) == 1.0, env.report


async def test_tests_that_cannot_run_are_no_fault_of_the_answer(boxes: SandboxManager) -> None:
    record = {**rows()["humaneval"], "test": "import nothing_like_this\ndef check(candidate):\n    pass\n"}
    with pytest.raises(EnvError, match="tests of this row cannot run: ModuleNotFoundError"):
        await graded(made(boxes), record, "def add(a, b): pass")


async def test_equal_answers_are_judged_once_where_asked(boxes: CountingManager) -> None:
    env, record = made(boxes, cache=True), rows()["functional"]
    assert await graded(env, record, "def add(a, b):\n    return b + a\n") == 1.0
    opened = boxes.opened
    assert await graded(env, record, "def add(a, b):\n    return b + a\n") == 1.0
    assert boxes.opened == opened
    assert await graded(env, record, "def add(a, b):\n    return b - a\n") == 0.0
    assert boxes.opened == opened + 1


async def test_an_agent_works_in_a_sandbox_and_submits(boxes: SandboxManager) -> None:
    env = made(boxes, agentic=True)
    task = task_of(rows()["functional"])
    await reset_env(env, task, seed=0)
    result = await called(
        env, ("editor", {"command": "create", "path": "solution.py", "file_text": "def add(a, b):\n"})
    )
    assert not result.terminated
    body = {"command": "insert", "path": "solution.py", "insert_line": 1, "new_str": "    return a + b\n"}
    result = await called(env, ("editor", body), ("submit", {}))
    assert (result.terminated, result.reward) == (True, 1.0)
    assert [message["content"] for message in result.observation][1] == "Submitted."
    assert result.info["metrics"]["tool_calls"] == 2.0
    assert result.info["metrics"]["tests_passed"] == 2.0
    await reset_env(env, task, seed=0)
    assert (await called(env, ("submit", {}))).reward == 0.0
    await reset_env(env, task, seed=0)
    assert (await play_solution(env))[-1][1].reward == 1.0
    await close_env(env)


async def test_sandbox_tool_without_a_sandbox_is_a_config_error(boxes: SandboxManager) -> None:
    env = made(boxes)
    env.tools = ("shell",)
    await reset_env(env, task_of(rows()["mbpp"]), seed=0)
    with pytest.raises(ConfigError, match="'shell' needs a sandbox, and the environment opened none"):
        await called(env, ("shell", {"command": "ls"}))
    await close_env(env)
