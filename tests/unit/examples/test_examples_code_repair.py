"""The example that repairs code: its functions are what they say, and its programs run in the sandbox alone."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from support.sandboxes.counting_manager import CountingManager
from turnwise.envs import close_env, fork_env, reset_env, step_env
from turnwise.envs.solution import play_solution, tool_call
from turnwise.plugins import load_object
from turnwise.tasks import Task

HERE = Path(__file__).parents[3] / "examples" / "code_repair"
ENV = f"{HERE / 'env.py'}:"


def of(name: str) -> Any:
    return load_object(ENV + name, "part of the example")


def row(n: int = 0, split: str = "test") -> Task:
    return list(of("tasks")(n + 1, split=split))[n]


def ran(file: str, inputs: list[list[int]]) -> list[int]:
    scope: dict[str, Any] = {}
    exec(file, scope)
    return [scope["f"](*arguments) for arguments in inputs]


def test_expected_values_are_those_of_the_right_function() -> None:
    kinds = set()
    for task in of("tasks")(200):
        data = task.data
        find, replace = data["fix"]
        assert data["file"].count(find) == 1
        assert ran(data["file"].replace(find, replace), data["inputs"]) == data["expected"]
        got = ran(data["file"], data["inputs"])
        first = data["inputs"][0]
        assert data["failure"] == f"f({first[0]}, {first[1]}): expected {data['expected'][0]}, got {got[0]}"
        assert [want != have for want, have in zip(data["expected"], got, strict=True)][:2] == [True, True]
        assert 4 <= data["visible"] <= 6 <= len(data["inputs"]) <= 16
        kinds.add(tuple(data["file"].count(word) for word in ("for", "if", "\n")))
    assert len(kinds) == 4


def test_splits_share_no_function() -> None:
    function = of("Function")
    shapes: dict[str, set[str]] = {"train": set(), "test": set()}
    for split, seen in shapes.items():
        for task in of("tasks")(300, split=split):
            lines = task.data["file"].replace(*task.data["fix"])
            head = lines[lines.index("(") + 1 :]
            names = [head[0], head[3], *dict.fromkeys(word for word in lines.split() if len(word) == 1)]
            order = [name for name in dict.fromkeys(names) if name in "abcdmnxy"]
            seen.add("".join(f"<{order.index(c)}>" if c in order and c != "f" else c for c in lines))
    assert not shapes["train"] & shapes["test"]
    assert function(random.Random(0)).shape == function(random.Random(0)).shape
    assert [task.data for task in of("tasks")(5)] == [task.data for task in of("tasks")(5)]


async def test_the_fix_is_worth_1_and_nothing_else_is() -> None:
    manager = CountingManager()
    try:
        for n in range(3):
            env = of("CodeRepair")()
            env.sandboxes = manager
            task = row(n)
            await reset_env(env, task)
            played = await play_solution(env)
            assert [message["content"] for message in played[1][1].observation] == ["all passed"]
            assert played[-1][1].info["rewards"] == {"solved": 1.0, "errors": 0.0}
            assert manager.opened == n + 1
            await close_env(env)
        # Nothing was done; the file is the old one; a failing test is answered with what failed.
        await reset_env(env, task)
        assert await said(env, "run_tests") == task.data["failure"]
        assert await said(env, "view") == task.data["file"]
        assert (await final(env))["solved"] == 0.0
    finally:
        await close_env(env)
        await manager.close()


async def said(env: Any, name: str, **arguments: Any) -> str:
    message = {"role": "assistant", "content": "", "tool_calls": [tool_call(name, **arguments)]}
    return str((await step_env(env, message)).observation[0]["content"])


async def final(env: Any) -> dict[str, float]:
    result = await step_env(env, {"role": "assistant", "content": "Done."})
    return dict(result.info["rewards"])


async def test_programs_cannot_answer_for_their_tests() -> None:
    env = of("CodeRepair")()
    task = row()
    await reset_env(env, task)
    try:
        source = task.data["file"]
        right = json.dumps([str(value) for value in task.data["expected"]])
        programs = [
            "import os, signal\ndef f(*_): os.kill(os.getpid(), signal.SIGKILL)\n",
            "import sys\nprint('[]', flush=True)\nsys.exit(0)\n",
            "class Same(int):\n    def __eq__(self, other): return True\ndef f(*_): return Same(0)\n",
            "import os\nos.write(1, b'not json')\n",
            "import sys\nsys.modules['__main__'].found = []\ndef f(*_): return [x for x in [1]]\n",
        ]
        for program in programs:
            assert "expected" in await said(env, "edit", find=source, replace=program)
        # What it needs to know to forge an answer is what it would need to know to be right.
        assert right not in json.dumps(await said(env, "view"))
        # The next program has a worker again.
        find, replace = task.data["fix"]
        assert await said(env, "edit", find=find, replace=replace) == "all passed"
        assert await said(env, "edit", find="nowhere", replace="") == "error"
        assert (await final(env)) == {"solved": 1.0, "errors": pytest.approx(-0.1)}
    finally:
        await close_env(env)


async def test_a_fork_has_a_worker_of_its_own() -> None:
    env, task = of("CodeRepair")(), row()
    find, replace = task.data["fix"]
    await reset_env(env, task)
    assert await said(env, "run_tests") == task.data["failure"]
    fork = await fork_env(env)
    try:
        assert await said(fork, "edit", find=find, replace=replace) == "all passed"
        assert await said(env, "view") == task.data["file"]
        assert await said(env, "edit", find=find, replace=find) == task.data["failure"]
        assert (await final(fork))["solved"] == 1.0
        assert (await final(env))["solved"] == 0.0
    finally:
        await close_env(fork)
        await close_env(env)


async def test_output_of_the_tests_can_be_hidden() -> None:
    task = row()
    find, replace = task.data["fix"]
    for shows, message in (("verdict", "all passed"), ("nothing", task.data["failure"])):
        env = of("CodeRepair")(shows=shows)
        await reset_env(env, task)
        assert await said(env, "edit", find=find, replace=replace) == message
        assert (await final(env))["solved"] == 1.0
        await close_env(env)


@pytest.mark.long
def test_the_teacher_is_mostly_wrong_and_edits_right() -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    try:
        rows = asyncio.run(load_object(f"{HERE / 'teacher.py'}:demonstrations", "teacher")(300, 0))
    finally:
        del sys.path[:2]
        for name in ("env", "conversations"):
            sys.modules.pop(name, None)
    answers = [[m["content"] for m in row["messages"] if m["role"] == "tool"] for row in rows]
    assert "error" not in {text for texts in answers for text in texts}
    right = sum(texts[-1] == "all passed" for texts in answers) / len(rows)
    assert 0.15 < right < 0.35
