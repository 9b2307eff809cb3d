"""Wrappers: each does its one thing, passes the rest on, and works around environments with and without tools."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.envs import (
    Env,
    EnvSpec,
    ShapeReward,
    SingleTurnEnv,
    StepResult,
    ToolEnv,
    TurnLimit,
    Wrapper,
    call_env,
    close_env,
    make,
    reset_env,
    score_env,
    step_env,
    wrap,
)
from turnwise.envs.basic.lookup import LookupEnv
from turnwise.errors import ConfigError, EnvError, RegistryError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.tools import BaseTool, ToolResponse, function_tool
from turnwise.types import ToolCall, text_of


def says(text, *names):
    calls = [ToolCall(f"c{number}", name, {}) for number, name in enumerate(names)]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


class Chatty(Env):
    """Continues until a message says stop; every step pays 0.5."""

    def reset(self, task=None, *, seed=None):
        return "go " * 20, {}

    def step(self, action):
        stopped = text_of(action) == "stop"
        return StepResult("on " * 200, 0.5, stopped, False, {"rewards": {"step": 0.5}, "metrics": {"m": 1.0}})

    def score(self, final):
        return {"late": 2.0}


class Tooled(ToolEnv):
    released = 0

    def reset(self, task=None, *, seed=None):
        return "go", {}

    @function_tool(inline=True)
    def look(self) -> ToolResponse:
        """Look."""
        return ToolResponse("seen " * 20, reward=0.25)

    @function_tool
    async def wait(self) -> str:
        """Wait."""
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True

    def score(self, final):
        self.scored = getattr(self, "scored", 0) + 1
        return 1.0

    def close(self):
        self.closed = getattr(self, "closed", 0) + 1


ALL = [lambda env: TurnLimit(env, 100), lambda env: ShapeReward(env, lambda reward, info, action: reward), Wrapper]


@pytest.mark.usefixtures("settled_objects")
@pytest.mark.ext
@pytest.mark.parametrize("number", range(len(ALL)))
async def test_wrapper_of_a_tool_env_is_a_tool_env_and_passes_the_checker(number):
    from turnwise.ext.checks.environment import check_env

    wrapped = ALL[number](make("lookup"))
    assert isinstance(wrapped, ToolEnv)
    assert isinstance(wrapped, Wrapper)
    assert type(wrapped).__name__ == type(ALL[number](Chatty())).__name__
    assert isinstance(wrapped.unwrapped, LookupEnv)
    report = await check_env(lambda: ALL[number](make("lookup")))
    assert report.findings == [], str(report)
    assert report.figures["reference solution, worst score"] == 1.0


@pytest.mark.parametrize("number", range(len(ALL)))
async def test_wrapper_of_a_plain_env_is_no_tool_env(number):
    wrapped = ALL[number](Chatty())
    assert not isinstance(wrapped, ToolEnv)
    await reset_env(wrapped, None, seed=1)
    result = await step_env(wrapped, says("a"))
    assert (result.reward, result.terminated, result.truncated) == (0.5, False, False)
    assert result.info["metrics"] == {"m": 1.0}
    assert await score_env(wrapped, None) == {"late": 2.0}
    await close_env(wrapped)


async def test_all_wrappers_together_score_and_release_once():
    events = []

    class Kept(BaseTool):
        async def create(self, instance_id=None, **kwargs):
            events.append("create")
            return await super().create(instance_id, **kwargs)

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse("done"), 0.125, {}

        async def calc_reward(self, instance_id, **kwargs):
            return 0.5

        async def release(self, instance_id, **kwargs):
            events.append("release")

    inner = Tooled()
    inner.tools = [Kept({}, {"name": "kept", "description": "Kept.", "parameters": {"type": "object"}})]
    env = inner
    for build in ALL:
        env = build(env)
    assert env.unwrapped is inner
    assert set(env.toolset()) == {"look", "wait", "kept"}
    await reset_env(env, None, seed=1)
    result = await step_env(env, says("", "kept", "look", "none"))
    assert [message["tool_call_id"] for message in result.observation] == ["c0", "c1", "c2"]
    assert result.info["rewards"] == {"tool/kept": 0.125, "tool/look": 0.25}
    result = await step_env(env, says("done"))
    assert result.info["rewards"] == {"score": 1.0, "tool/kept": 0.5}
    assert inner.scored == 1
    await close_env(env)
    assert (events, inner.closed) == (["create", "release"], 1)


async def test_turn_limit_truncates_at_the_last_turn_unless_terminated():
    env = TurnLimit(Chatty(), 2)
    for _ in range(2):
        await reset_env(env, None, seed=1)
        assert not (await step_env(env, says("a"))).truncated
        second = await step_env(env, says("a"))
        assert (second.terminated, second.truncated, second.info["stop_reason"]) == (False, True, "max_turns")
        assert second.reward == 0.5
    await reset_env(env, None, seed=1)
    await step_env(env, says("a"))
    final = await step_env(env, says("stop"))
    assert (final.terminated, final.truncated) == (True, False)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_score_that_a_cancelled_step_began_is_taken_once(depth):
    started, gate = asyncio.Event(), asyncio.Event()
    count = 0

    async def slow(task, final):
        nonlocal count
        count += 1
        started.set()
        await gate.wait()
        return 0.75

    env = SingleTurnEnv(slow)
    for _ in range(depth):
        env = Wrapper(env)
    await reset_env(env, Task("a", "hi"), seed=1)
    stepping = asyncio.ensure_future(step_env(env, says("a")))
    await started.wait()
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert env.pending_score is not None
    gate.set()
    assert await score_env(env, says("a")) == {"score": 0.75}
    assert count == 1
    await close_env(env)


async def test_shaped_reward_is_the_functions_and_names_the_difference():
    seen = []

    async def minus(reward, info, action):
        seen.append((reward, text_of(action or {})))
        return reward - 0.1

    env = ShapeReward(Chatty(), minus)
    await reset_env(env, None, seed=1)
    result = await step_env(env, says("a"))
    assert result.reward == pytest.approx(0.4)
    assert result.info["rewards"] == {"step": 0.5, "shaping": pytest.approx(-0.1)}
    parts = await score_env(env, None)
    assert sum(parts.values()) == pytest.approx(1.9)
    assert seen == [(0.5, "a"), (2.0, "")]

    env = ShapeReward(Tooled(), lambda reward, info, action: {"double": 2 * reward})
    await reset_env(env, None, seed=1)
    assert (await step_env(env, says("", "look"))).info["rewards"] == {"double": 0.5}
    assert (await call_env(env, ToolCall("c", "look", {}))).reward == 0.5
    assert (await step_env(env, says("x"))).info["rewards"] == {"double": 2.0}


@pytest.mark.parametrize("value", [float("nan"), None, "0.5", {"a": "b"}])
async def test_a_shaping_function_that_returns_no_number_is_an_error(value):
    env = ShapeReward(Chatty(), lambda reward, info, action: value)
    await reset_env(env, None, seed=1)
    with pytest.raises(EnvError, match="reward shaping function returned"):
        await step_env(env, says("a"))


def test_wrong_wrapper_settings_raise_config_errors():
    for wrong in (0, -1, 1.5, True, "3"):
        with pytest.raises(ConfigError, match="max_turns is"):
            TurnLimit(Chatty(), wrong)
    with pytest.raises(ConfigError, match="must be a function"):
        ShapeReward(Chatty(), 3)
    with pytest.raises(ConfigError, match="wraps an environment, not 3"):
        Wrapper(3)
    with pytest.raises(ConfigError, match="did you mean 'turn_limit'"):
        wrap(Chatty(), "turn_limits")
    with pytest.raises(ConfigError, match="did you mean 'max_turns'"):
        wrap(Chatty(), "turn_limit", max_turn=3)
    with pytest.raises(ConfigError, match="must be a subclass"):
        wrap(Chatty(), "turnwise.envs.basic.lookup:LookupEnv")
    with pytest.raises(RegistryError, match="wrappers"):
        EnvSpec("lookup", wrappers=[{"name": "shape_reward", "config": {"shape": lambda *_: 0.0}}])


def bonus(reward, info, action):
    return reward + 0.5


class Mine(Wrapper):
    def __init__(self, env, word):
        super().__init__(env)
        self.word = word

    async def reset(self, task=None, *, seed=None):
        messages, info = await super().reset(task, seed=seed)
        return [{"role": "system", "content": self.word}, *messages], info


SPECS = [
    {"name": "turn_limit", "config": {"max_turns": 2}},
    {"name": "shape_reward", "config": {"shape": f"{__name__}:bonus"}},
    {"name": f"{__name__}:Mine", "config": {"word": "hello"}},
]


async def test_a_spec_puts_wrappers_around_and_travels():
    spec = EnvSpec(**json.loads(json.dumps(EnvSpec("lookup", wrappers=SPECS).to_record())))
    env = spec.make()
    assert isinstance(env, Mine)
    assert isinstance(env, ToolEnv)
    assert isinstance(env.env, ShapeReward)
    messages, _ = await reset_env(env, None, seed=1)
    assert messages[0] == {"role": "system", "content": "hello"}
    await close_env(env)


async def test_a_rollout_by_configuration_runs_in_the_wrapped_environment():
    renderer = ToyRenderer()
    call = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "team_of", {"person": "ana"})]}
    config = RolloutConfig(env=SpecConfig(name="lookup", wrappers=SPECS[:2]))
    client = ScriptedClient(renderer, lambda request: call)
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer))
    [group] = await producer.gather([RolloutRequest(Task("a", "x"), group_size=2)])
    await producer.close()
    for trajectory in group.trajectories:
        assert (trajectory.stop_reason, trajectory.error) == ("max_turns", None)
        assert trajectory.reward == 1.5  # two steps and the score, each with the bonus


async def test_a_wrapper_that_is_not_there_is_told_before_anything_runs():
    renderer = ToyRenderer()
    config = RolloutConfig(env={"name": "lookup", "wrappers": [{"name": "turn_limits"}]})
    with pytest.raises(ConfigError, match="turn_limit"):
        await RolloutProducer.create(
            config, ScriptedClient(renderer, lambda request: "x"), None, RolloutParts(renderer)
        )
