"""The environment ``code`` on bubblewrap: every row that ships, every cheat in every format, and ``check_env``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.chat.toy_renderer import ToyRenderer
from support.envs.code_cheats import FUNCTION_CHEATS, KILLER, PROGRAM_CHEATS, rows
from support.envs.published_rows import ONE_ROW
from support.envs.sandboxed_episodes import answered, fenced, some_boxes
from turnwise.envs import EnvSpec
from turnwise.envs.core import close_env, reset_env
from turnwise.envs.solution import play_solution
from turnwise.ext.checks.environment import check_env
from turnwise.ext.environments.code import CodeEnv, row, tasks
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.sandboxes.manager import SandboxManager
from turnwise.tasks import SourceConfig, Task, load_tasks
from turnwise.types import Message, StopReason, ToolCall

pytestmark = [pytest.mark.real, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

CHEATS = [
    (form, name, code)
    for form in rows()
    for name, code in (PROGRAM_CHEATS if form == "stdin" else {**FUNCTION_CHEATS, **KILLER}).items()
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes() -> AsyncIterator[SandboxManager]:
    async with some_boxes("bubblewrap") as manager:
        yield manager


async def scored(boxes: SandboxManager, task: Task, answer: str | None, **config: Any) -> float:
    """The score of an answer; None is the reference."""
    env = CodeEnv(**{"packages": True, "time_limit": 20.0, **config})
    env.sandboxes = boxes
    if answer is None:
        await reset_env(env, task, seed=0)
        reward = (await play_solution(env))[-1][1].reward
    else:
        reward = (await answered(env, task, fenced(answer))).reward
    await close_env(env)
    return reward


@pytest.mark.parametrize("form", ["humaneval", "mbpp", "functional", "stdin"])
async def test_references_score_1_and_empty_answers_0(boxes: SandboxManager, form: str) -> None:
    every = list(tasks(format=form))
    assert len(every) == 12
    gate = asyncio.Semaphore(4)

    async def one(task: Task, answer: str | None) -> float:
        async with gate:
            return await scored(boxes, task, answer)

    assert await asyncio.gather(*(one(task, None) for task in every)) == [1.0] * 12
    assert await asyncio.gather(*(one(task, "") for task in every)) == [0.0] * 12


@pytest.mark.alike("cheats on code")
@pytest.mark.parametrize(("form", "name", "code"), CHEATS, ids=[f"{form}: {name}" for form, name, _ in CHEATS])
async def test_no_cheat_scores(boxes: SandboxManager, form: str, name: str, code: str) -> None:
    task = Task.from_record(row(rows()[form]), default_id=name)
    assert await scored(boxes, task, code, partial=True) == 0.0


async def test_rows_as_published_are_played(boxes: SandboxManager, tmp_path: Path) -> None:
    """The reference scores 1 and a wrong program 0, by the format's name; LiveCodeBench publishes no references."""
    sources = {}
    for name in ("humaneval", "mbpp", "livecodebench"):
        file = tmp_path / f"{name}.jsonl"
        for number, record in enumerate(ONE_ROW[name]):
            sources[f"{name}/{number}"] = f"{file}.{number}.jsonl"
            Path(f"{file}.{number}.jsonl").write_text(json.dumps(record))
    for label, source in sources.items():
        name = label.partition("/")[0]
        for task in load_tasks(SourceConfig(source=source, format=name)):
            right = "print(sum(map(int, input().split())))" if name == "livecodebench" else None
            assert (task.env, await scored(boxes, task, right)) == ("code", 1.0), label
            assert await scored(boxes, task, "print(3)") == 0.0, label


async def test_the_references_submitted_by_an_agent(boxes: SandboxManager) -> None:
    for task in list(tasks(format="functional"))[:3]:
        assert await scored(boxes, task, None, agentic=True) == 1.0


async def test_code_environment_with_packages_passes_the_checker() -> None:
    task = next(tasks(format="functional"))
    report = await check_env(EnvSpec("code", {"packages": True}), task=task, seeds=(0,), timeout=120.0)
    assert report.ok, str(report)


async def test_a_solution_that_takes_its_sandbox_along_scores_0(boxes: SandboxManager) -> None:
    task = Task.from_record(row(rows()["functional"]), default_id="bomb")
    bomb = (
        "import os\ndef add(a, b):\n    held = []\n    for _ in range(8):\n        if os.fork() == 0:\n"
        "            while True:\n                held.append(bytearray(2**24))\n    os.wait()\n    return 0\n"
    )
    assert await scored(boxes, task, bomb, memory=256, time_limit=5.0) == 0.0


def calling(tool: str, **arguments: Any) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", tool, arguments)]}


async def test_a_rollout_of_an_agent_that_submits() -> None:
    config = RolloutConfig.model_validate(
        {
            "env": {"name": "code", "config": {"agentic": True, "packages": True}, "tools": ["apply_patch"]},
            "sandbox": {"config": {"isolation": "bubblewrap"}},
        }
    )
    renderer = ToyRenderer()
    patch = "*** Begin Patch\n*** Add File: solution.py\n+def add(a, b):\n+    return a + b\n*** End Patch"
    script = [
        calling("apply_patch", patch=patch),
        calling("shell", command="python3 -c 'import solution; print(solution.add(1, 2))'"),
        calling("submit"),
    ]
    task = Task.from_record(row(rows()["functional"]), default_id="add")
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, script), None, RolloutParts(renderer))
    [group] = await producer.gather([RolloutRequest(task)])
    await producer.close()
    [trajectory] = group.trajectories
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.COMPLETED)
    assert "3" in "".join(renderer.decode(segment.token_ids) for segment in trajectory.segments)
    assert trajectory.metrics["tests_passed"] == 2.0
