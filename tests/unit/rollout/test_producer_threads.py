"""Tools that never come back: they cost a thread each, up to a bound, and never the end of the process."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.processes.warm import run_command
from turnwise.envs.registration import register
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, TurnwiseError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.types import StopReason, ToolCall

RELEASED = threading.Event()


class Sleepy(ToolEnv):
    """Has a tool that returns at once and one that waits for the test."""

    def reset(self, task=None, *, seed=None):
        return "go", {}

    @function_tool(timeout=0.3)
    def hang(self) -> str:
        """Hang."""
        RELEASED.wait()
        return "late"

    @function_tool
    def quick(self) -> str:
        """Return."""
        return "now"

    def score(self, final):
        return 1.0


register("test-producer-sleepy", Sleepy)


@pytest.fixture(autouse=True)
def _release():
    RELEASED.clear()
    yield
    RELEASED.set()


def calls(name: str):
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", name, {})]}


async def produce(script, group_size: int, **config):
    renderer = ToyRenderer()
    producer = await RolloutProducer.create(
        RolloutConfig(env=SpecConfig(name="test-producer-sleepy"), **config),
        ScriptedClient(renderer, script),
        None,
        RolloutParts(renderer),
    )
    try:
        [group] = await producer.gather([RolloutRequest(Task("t", "go"), group_size=group_size)])
        return group
    finally:
        await producer.close()


async def test_lost_threads_up_to_the_bound_cost_their_episodes_only(monkeypatch) -> None:
    """With one thread: the place of each lost one is filled, else nobody after the first would be answered."""
    monkeypatch.setattr("turnwise.rollout.producer.MAX_LOST_THREADS", 2)

    def script(request):
        if request.text.count("now"):
            return "done"
        return calls("hang" if "/0." in request.session_id or "/1." in request.session_id else "quick")

    group = await produce(script, 4, concurrency=1)
    assert (len(group.trajectories), group.failed) == (2, 2)
    assert {t.stop_reason for t in group.trajectories} == {StopReason.COMPLETED}
    assert {t.reward for t in group.trajectories} == {1.0}


@pytest.mark.long
@pytest.mark.parametrize("bound", [0, 2])
async def test_one_lost_thread_above_the_bound_ends_the_run(bound: int, monkeypatch) -> None:
    monkeypatch.setattr("turnwise.rollout.producer.MAX_LOST_THREADS", bound)
    match = rf"{bound + 1} abandoned threads .*a run bears {bound}\..*make it async.*outran"
    with pytest.raises(EnvError, match=match):
        await produce(lambda _: calls("hang"), 8, concurrency=1)


@pytest.mark.long
async def test_a_thread_that_comes_back_after_all_is_lost_no_more(monkeypatch) -> None:
    """Five tools, more than may be lost, in a row outrun their time-out; each comes back before the next is called."""
    monkeypatch.setattr("turnwise.rollout.producer.MAX_LOST_THREADS", 3)
    back = threading.Semaphore(0)

    class Late(Sleepy):
        @function_tool(timeout=0.3)
        def hang(self) -> str:
            """Hang."""
            RELEASED.wait()
            back.release()
            return "late"

        def close(self):
            RELEASED.set()
            back.acquire()
            RELEASED.clear()

    register("test-producer-late", Late)
    renderer = ToyRenderer()
    producer = await RolloutProducer.create(
        RolloutConfig(env=SpecConfig(name="test-producer-late"), concurrency=1),
        ScriptedClient(renderer, lambda _: calls("hang")),
        None,
        RolloutParts(renderer),
    )
    [group] = await producer.gather([RolloutRequest(Task("t", "go"), group_size=5)])
    await producer.close()
    assert group.failed == 5


async def test_without_a_buffer_nothing_is_started() -> None:
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, [])
    producer = await RolloutProducer.create(
        RolloutConfig(env=SpecConfig(name="test-producer-sleepy")), client, None, RolloutParts(renderer)
    )
    with pytest.raises(TurnwiseError, match=r"without a buffer: use gather"):
        producer.generate_sequences([RolloutRequest(Task("t", "go"))])
    await producer.close()


PROGRAM = """
import asyncio, threading
from support.chat.toy_renderer import ToyRenderer
from turnwise.envs.registration import register
from turnwise.envs.tool_env import ToolEnv
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.types import ToolCall

class Stuck(ToolEnv):
    def reset(self, task=None, *, seed=None):
        return "go", {}
    @function_tool(timeout=0.3)
    def hang(self) -> str:
        "Hang."
        threading.Event().wait()
    def score(self, final):
        return 0.0

register("stuck", Stuck)

async def main():
    renderer = ToyRenderer()
    said = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "hang", {})]}
    producer = await RolloutProducer.create(
        RolloutConfig(env=SpecConfig(name="stuck")), ScriptedClient(renderer, [said]), None, RolloutParts(renderer)
    )
    [group] = await producer.gather([RolloutRequest(Task("t", "go"))])
    await producer.close()
    print("failed", group.failed)

asyncio.run(main())
"""


@pytest.mark.long
def test_a_process_with_a_lost_thread_ends() -> None:
    tests = Path(__file__).parents[2]
    done = run_command([sys.executable, "-c", PROGRAM], cwd=tests, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "failed 1\n"), done.stderr
