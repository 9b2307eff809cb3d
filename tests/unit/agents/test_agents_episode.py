"""An episode whose agent answers calls one by one: the same ends as with whole messages."""

from __future__ import annotations

import asyncio
import threading

import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.agents.core import Agent, Episode
from turnwise.agents.registry import register_agent
from turnwise.envs.core import Env, StepResult
from turnwise.envs.registration import register
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import AgentError, BudgetExceeded
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.tools.execute import ToolThreads
from turnwise.types import StopReason, ToolCall

LOG: list[str] = []


@pytest.fixture(autouse=True)
def _empty_log():
    LOG.clear()


class Counter(ToolEnv):
    """Has one tool, and pays a quarter for an episode that it scores."""

    max_invalid_calls = 2

    def __init__(self, max_invalid_calls: int = 2) -> None:
        self.max_invalid_calls = max_invalid_calls

    def reset(self, task=None, *, seed=None):
        return "count", {}

    @function_tool(inline=True)
    def add(self, n: int) -> str:
        """Add."""
        LOG.append(f"add {n}")
        return str(n)

    def score(self, final):
        LOG.append(f"score {final and final['content']}")
        return 0.25


class Whole(Env):
    def reset(self, task=None, *, seed=None):
        return "go", {}

    def step(self, action):
        return StepResult("", 1.0, True, False, {})


register("test-agents-counter", Counter)
register("test-agents-whole", Whole)

GOOD, BAD = ("add", {"n": 1}), ("subtract", {"n": 1})


class OneByOne(Agent):
    """Answers each call by itself; continues after the end if configured."""

    def __init__(self, swallow: bool = False) -> None:
        self.swallow = swallow

    async def run(self, episode: Episode) -> None:
        message = await episode.session.chat(episode.observation, episode.tools)
        for call in message["tool_calls"]:
            try:
                LOG.append((await episode.call(call)).error or "answered")
            except BudgetExceeded as spent:
                LOG.append(spent.stop_reason)
                if not self.swallow:
                    raise


register_agent("test-one-by-one")(OneByOne)


async def run(*calls: tuple[str, dict], env: str = "test-agents-counter", swallow: bool = False, **config):
    renderer = ToyRenderer()
    message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", *call) for call in calls]}
    settings = RolloutConfig(
        env=SpecConfig(name=env, config=config), agent=SpecConfig(name="test-one-by-one", config={"swallow": swallow})
    )
    runner = EpisodeRunner(settings, ScriptedClient(renderer, [message]), renderer, context_length=5000)
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
    return outcome.trajectories[0], outcome


async def test_unusable_calls_in_a_row_end_the_episode_as_they_do_in_a_step() -> None:
    trajectory, outcome = await run(BAD, BAD, GOOD)
    assert outcome.error is None
    assert trajectory.stop_reason is StopReason.INVALID_CALLS
    # Scored without an answer, as after a step that truncates.
    assert LOG == ["unknown_tool", "invalid_calls", "score None"]
    assert trajectory.rewards == [(None, "score", 0.25)]
    assert trajectory.metrics["tool_calls"] == trajectory.metrics["tool_errors"] == 2


async def test_usable_call_resets_the_count_of_invalid_single_calls() -> None:
    trajectory, _ = await run(BAD, GOOD, BAD, GOOD)
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert LOG == ["unknown_tool", "add 1", "answered", "unknown_tool", "add 1", "answered", "score None"]


async def test_max_invalid_calls_of_zero_never_ends_the_episode() -> None:
    trajectory, _ = await run(*[BAD] * 9, max_invalid_calls=0)
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert LOG.count("unknown_tool") == 9


async def test_an_agent_that_goes_on_all_the_same_reaches_no_tool_any_more() -> None:
    trajectory, outcome = await run(BAD, BAD, GOOD, GOOD, swallow=True)
    assert outcome.error is None
    assert trajectory.stop_reason is StopReason.INVALID_CALLS
    assert LOG == ["unknown_tool", "invalid_calls", "invalid_calls", "invalid_calls", "score None"]


async def test_an_environment_that_answers_whole_messages_only_is_named() -> None:
    trajectory, outcome = await run(GOOD, env="test-agents-whole")
    assert isinstance(outcome.error, AgentError)
    assert not outcome.error.retryable
    assert "Whole is not a ToolEnv" in (trajectory.error or "")


class StepsThenCalls(Agent):
    async def run(self, episode: Episode) -> None:
        message = await episode.session.chat(episode.observation, episode.tools)
        await episode.step({"role": "assistant", "content": "done"})
        await episode.call(message["tool_calls"][0])


register_agent("test-steps-then-calls")(StepsThenCalls)


async def test_a_call_after_the_end_is_an_error_of_the_agent() -> None:
    renderer = ToyRenderer()
    message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", *GOOD)]}
    config = RolloutConfig(env=SpecConfig(name="test-agents-counter"), agent=SpecConfig(name="test-steps-then-calls"))
    runner = EpisodeRunner(config, ScriptedClient(renderer, [message]), renderer, context_length=5000)
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
    assert "episode.call was called after the episode ended" in str(outcome.error)
    assert "add 1" not in LOG


# Threads that do not come back


class Stuck(Env):
    """A blocking environment whose method ``stuck_in`` waits until it is released."""

    blocking = True
    released: threading.Event

    def __init__(self, stuck_in: str) -> None:
        self.stuck_in = stuck_in

    def enter(self, method: str) -> None:
        LOG.append(method)
        if method == self.stuck_in:
            self.released.wait()

    def reset(self, task=None, *, seed=None):
        self.enter("reset")
        return "go", {}

    def step(self, action):
        self.enter("step")
        return StepResult("again", 0.0, False, False, {})

    def score(self, final):
        self.enter("score")
        return 1.0


register("test-agents-stuck", Stuck)


@pytest.mark.parametrize(
    ("stuck_in", "reason", "log"), [("reset", "error", ["reset"]), ("step", "timeout", ["reset", "step"])]
)
async def test_a_method_that_never_returns_is_a_lost_thread_and_nothing_is_scored(stuck_in, reason, log) -> None:
    Stuck.released = threading.Event()
    threads = ToolThreads(2)
    renderer = ToyRenderer()
    config = RolloutConfig(env=SpecConfig(name="test-agents-stuck", config={"stuck_in": stuck_in}), episode_timeout=0.8)
    runner = EpisodeRunner(config, ScriptedClient(renderer, ["x"] * 9), renderer, context_length=5000, executor=threads)
    try:
        outcome: EpisodeOutcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
        [trajectory] = outcome.trajectories
        assert trajectory.stop_reason == reason
        assert outcome.error is not None
        assert trajectory.rewards == []
        assert log == LOG
        assert threads.lost == 1
        # Its place is another's.
        async with asyncio.timeout(10):
            assert await asyncio.gather(*(asyncio.wrap_future(threads.submit(int, "7")) for _ in range(4))) == [7] * 4
    finally:
        Stuck.released.set()
        threads.shutdown()
