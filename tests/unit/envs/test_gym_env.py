"""Gymnasium's environments through this package: exact rewards, ends and seeds; texts, tools and spaces."""

from __future__ import annotations

import json
import math
import threading
import time

import gymnasium
import jsonschema
import numpy as np
import pytest
from gymnasium import spaces

from support.chat.toy_renderer import ToyRenderer
from turnwise.envs import EnvSpec, close_env, make, reset_env, schemas, step_env
from turnwise.envs.gym.from_gymnasium import _action_value, from_gymnasium
from turnwise.envs.gym.text import plain_value, space_schema, value_from_json, value_text
from turnwise.errors import ConfigError, EnvError, ToolError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.types import ToolCall

NAMES = {
    "FrozenLake-v1": ["left", "down", "right", "up"],
    "Taxi-v4": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack-v1": ["stick", "hit"],
    "CartPole-v1": ["left", "right"],
}


def says(text):
    return {"role": "assistant", "content": text}


def calls(*named_calls):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [ToolCall(f"c{n}", *named_call) for n, named_call in enumerate(named_calls)],
    }


def message(name, tools):
    return calls((name, {})) if tools else says(f"I think so.\nAction: {name}")


@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
@pytest.mark.parametrize("env_id", NAMES)
async def test_an_episode_is_the_raw_environment_step_by_step(env_id, tools):
    raw, env = gymnasium.make(env_id), from_gymnasium(env_id, tools=tools)
    rng = np.random.default_rng(0)
    ends = set()
    for seed in range(4):
        expected, _ = raw.reset(seed=seed)
        observation, info = await reset_env(env, None, seed=seed)
        assert info["observation"] == plain_value(expected)
        assert [message["role"] for message in observation] == ["system", "user"]
        done = False
        while not done:
            action = int(rng.integers(raw.action_space.n))
            expected, reward, terminated, truncated, _ = raw.step(action)
            result = await step_env(env, message(NAMES[env_id][action], tools))
            assert result.info["observation"] == plain_value(expected)
            assert (result.reward, result.terminated, result.truncated) == (reward, terminated, truncated)
            [answer] = result.observation
            assert answer["role"] == ("tool" if tools else "user")
            assert answer["content"] == env.world.text()
            done = terminated or truncated
            ends.add("terminated" if terminated else "truncated" if truncated else "")
        with pytest.raises(EnvError, match="no episode runs"):
            await step_env(env, message(NAMES[env_id][0], tools))
    assert ends >= ({"truncated"} if env_id == "Taxi-v4" else {"terminated"})
    await close_env(env)
    raw.close()


async def test_rendered_text_of_each_world():
    texts = {}
    for env_id in NAMES:
        env = from_gymnasium(env_id)
        (system, first), _ = await reset_env(env, None, seed=1)
        texts[env_id] = (system["content"], first["content"])
        await close_env(env)
    assert texts["FrozenLake-v1"][1] == "PFFF\nFHFH\nFFFH\nHFFG"
    assert "one of: left, down, right, up" in texts["FrozenLake-v1"][0]
    assert "one of: stick, hit" in texts["Blackjack-v1"][0]
    assert len(json.loads(texts["CartPole-v1"][1])) == 4


async def test_ansi_render_brackets_coloured_parts():
    env = make("gymnasium", env_id="FrozenLake-v1", kwargs={"render_mode": "ansi"}, render="ansi")
    observation, _ = await reset_env(env, None, seed=1)
    assert observation[-1]["content"] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    await close_env(env)
    env = make("gymnasium", env_id="FrozenLake-v1", render="ansi")
    with pytest.raises(EnvError, match="render_mode='ansi'"):
        await reset_env(env, None, seed=1)


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("right", True),
        ("RIGHT.", True),
        ("2", True),
        ("Action: right", True),
        ("**Action**: right", True),
        ("left or right?\nright", True),
        ("<action>up</action> no: <action>right</action> yes", True),
        ("right, I think", False),
        ("4", False),
        ("-1", False),
        ("", False),
        ("true", False),
        ("[2]", False),
        ("9" * 5000, False),
        ("{" * 5000, False),
    ],
)
async def test_how_a_message_says_its_action(text, moved):
    env = from_gymnasium(lambda: gymnasium.make("FrozenLake-v1", is_slippery=False))
    await reset_env(env, None, seed=1)
    result = await step_env(env, says(text))
    assert result.info["observation"] == (1 if moved else 0)
    assert ("is not an action: write one of: left, down, right, up" in result.observation[0]["content"]) != moved
    await close_env(env)


@pytest.mark.parametrize("tools", [False, True])
async def test_messages_without_an_action_truncate_and_the_world_stands_still(tools):
    env = from_gymnasium("FrozenLake-v1", tools=tools, max_invalid=2)
    await reset_env(env, None, seed=1)
    first = await step_env(env, says("hm"))
    assert (first.reward, first.terminated, first.truncated) == (0.0, False, False)
    second = await step_env(env, says("hm"))
    assert (second.truncated, second.info["stop_reason"]) == (True, "invalid_calls")
    await close_env(env)


async def test_a_call_where_there_are_no_tools_is_answered():
    env = from_gymnasium("FrozenLake-v1")
    await reset_env(env, None, seed=1)
    result = await step_env(env, calls(("go", {})))
    assert [message["tool_call_id"] for message in result.observation] == ["c0"]
    assert "unknown_tool" in result.observation[0]["content"]
    await close_env(env)


async def test_actions_after_the_end_are_not_taken():
    env = from_gymnasium("Blackjack-v1", tools=True)
    await reset_env(env, None, seed=1)
    result = await step_env(env, calls(("stick", {}), ("hit", {}), ("nothing", {})))
    assert result.terminated
    assert [message["tool_call_id"] for message in result.observation] == ["c0", "c1", "c2"]
    assert "the episode is over" in result.observation[1]["content"]
    assert result.reward in (-1.0, 0.0, 1.0)
    await close_env(env)


class Odd(gymnasium.Env):
    """Takes an action of any space, and says what it got."""

    def __init__(self, action_space, observation_space=None):
        self.action_space = action_space
        self.observation_space = observation_space or action_space
        self.taken = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.options = options
        return self.observation_space.sample(), {}

    def step(self, action):
        self.taken.append(action)
        return self.observation_space.sample(), 0.5, False, len(self.taken) == 3, {}


SPACES = [
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary(3),
    spaces.Box(-1.0, 1.0, (2,), np.float32),
    spaces.Box(0, 9, (2, 2), np.int64),
    spaces.Box(np.float32(-np.inf), np.float32(np.inf), ()),
    spaces.Text(5),
    spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (1,), np.float64)}),
    spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]),
]


@pytest.mark.parametrize("space", SPACES, ids=repr)
async def test_every_space_has_a_text_a_schema_and_a_way_back(space):
    space.seed(1)
    schema = space_schema(space)
    jsonschema.Draft202012Validator.check_schema(schema)
    for _ in range(20):
        value = space.sample()
        as_json = json.loads(json.dumps(plain_value(value)))
        jsonschema.validate(as_json, schema)
        back = value_from_json(space, as_json)
        assert space.contains(back)
        assert plain_value(back) == as_json
        assert isinstance(value_text(space, value), str)
    huge = 10**400  # JSON has no largest number
    for wrong in ({"x": 1}, [[[1]]], "a text that is too long", None, True, [0.5, 0.5, 0.5], 1e300, huge, [huge] * 2):
        with pytest.raises(ToolError, match="is not an action"):
            value_from_json(space, wrong)


@pytest.mark.parametrize("space", SPACES, ids=repr)
async def test_every_space_is_acted_in_by_text_and_by_tool(space):
    sample = space.sample()
    text = sample if isinstance(sample, str) else json.dumps(plain_value(sample))
    by_text, by_tool = from_gymnasium(Odd(space)), from_gymnasium(Odd(space), tools=True)
    assert [schema.name for schema in schemas(by_tool)] == ["act"]
    message = calls(("act", {"action": plain_value(sample)}))
    for env, action in ((by_text, says(f"<action>{text}</action>")), (by_tool, message)):
        await reset_env(env, Task("a", "", {"options": {"level": 2}}), seed=1)
        assert env.world.env.options == {"level": 2}
        results = [await step_env(env, action) for _ in range(3)]
        assert [(result.reward, result.truncated) for result in results] == [(0.5, False), (0.5, False), (0.5, True)]
        assert [plain_value(result) for result in env.world.env.taken] == [plain_value(sample)] * 3
        await close_env(env)


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("value", [1e300, 10**400, math.nan, "\ud800", [math.nan, 1], [[1e39]], {"no": 1}], ids=repr)
async def test_an_action_that_is_none_is_told_to_the_model_and_ends_nothing(space, value):
    # Also where it fits the schema: a text of other letters, an element beyond its own bound.
    env = from_gymnasium(Odd(space), tools=True)
    await reset_env(env, None, seed=1)
    result = await step_env(env, calls(("act", {"action": value})))
    assert '"error"' in result.observation[0]["content"]
    assert not (result.terminated)
    assert not (result.truncated)
    assert env.world.env.taken == []
    await close_env(env)


async def test_float_with_integer_value_is_an_integer_action():
    env = from_gymnasium(Odd(gymnasium.spaces.Discrete(3)), tools=True)
    await reset_env(env, None, seed=1)
    await step_env(env, calls(("act", {"action": 1.0})))
    assert env.world.env.taken == [1]
    await close_env(env)


def test_a_text_of_opening_tags_costs_no_more_than_its_length():
    started = time.process_time()
    assert _action_value("<action>" * 30_000 + "2", gymnasium.spaces.Discrete(3)) == "<action>" * 30_000 + "2"
    assert time.process_time() - started < 2
    assert _action_value("<action>1</action> <ACTION>2</ACTION> <action>", gymnasium.spaces.Discrete(3)) == 2


async def test_custom_render_and_parse_functions_are_used():
    env = from_gymnasium(
        "FrozenLake-v1",
        render=lambda observation, env: f"cell {observation} of {env.observation_space.n}",
        parse=lambda text, env: {"go": 2}[text],
        instructions="Go.",
    )
    (system, first), _ = await reset_env(env, None, seed=1)
    assert first["content"] == "cell 0 of 16"
    assert system["content"].startswith("Go.\n")
    with pytest.raises(EnvError, match="KeyError"):
        await step_env(env, says("hm"))
    assert (await step_env(env, says("go"))).observation[0]["content"].startswith("cell ")
    await close_env(env)


async def test_a_blocking_world_steps_in_a_thread():
    class Slow(Odd):
        def step(self, action):
            self.thread = threading.current_thread().name
            return super().step(action)

    for tools, action in ((False, says("1")), (True, calls(("act", {"action": 1})))):
        env = from_gymnasium(Slow(spaces.Discrete(2)), tools=tools, blocking=True)
        await reset_env(env, None, seed=1)
        await step_env(env, action)
        assert env.world.env.thread == "turnwise-tool"
        await close_env(env)


def test_bad_arguments_are_told():
    with pytest.raises(ConfigError, match=r"gymnasium.make\('NoSuch-v1'"):
        from_gymnasium("NoSuch-v1")
    with pytest.raises(ConfigError, match="wrong_option"):
        from_gymnasium("FrozenLake-v1", kwargs={"wrong_option": 1})
    with pytest.raises(ConfigError, match="Discrete"):
        from_gymnasium("FrozenLake-v1", actions=["a", "b"])
    with pytest.raises(ConfigError, match="must be unique"):
        from_gymnasium("CartPole-v1", actions=["a b", "a?b"])
    with pytest.raises(ConfigError, match=r"not a gymnasium\.Env"):
        from_gymnasium(lambda: 3)
    with pytest.raises(ConfigError, match="kwargs"):
        from_gymnasium(lambda: 3, kwargs={"a": 1})
    with pytest.raises(ConfigError, match="tools=True"):
        from_gymnasium("CartPole-v1", tools=True, parse=lambda text, env: 0)
    with pytest.raises(EnvError, match="render= and parse="):
        from_gymnasium(Odd(spaces.Sequence(spaces.Discrete(2))))


@pytest.mark.usefixtures("settled_objects")
@pytest.mark.ext
@pytest.mark.parametrize("env_id", [name for name in NAMES if name != "Taxi-v4"])
async def test_checker_accepts_gymnasium_environments(env_id):
    from turnwise.ext.checks.environment import check_env

    report = await check_env(EnvSpec("gymnasium_tools", {"env_id": env_id}), seeds=(0,))
    assert report.ok, str(report)


async def test_a_rollout_in_a_world_of_gymnasium():
    renderer = ToyRenderer()
    path = ["down", "down", "right", "right", "down", "right"]
    config = RolloutConfig(
        env=SpecConfig(name="gymnasium", config={"env_id": "FrozenLake-v1", "kwargs": {"is_slippery": False}})
    )
    client = ScriptedClient(renderer, lambda request: path[request.number])
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer))
    [group] = await producer.gather([RolloutRequest(Task("a", "lake"), group_size=2)])
    await producer.close()
    for trajectory in group.trajectories:
        assert (trajectory.reward, trajectory.stop_reason, trajectory.error) == (1.0, "completed", None)
        assert len(trajectory.rewards) >= 1
