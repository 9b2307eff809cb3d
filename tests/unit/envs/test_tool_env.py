"""ToolEnv: one answer per call, the final answer is scored once, episodes begin and end cleanly."""

import asyncio
import json
import sqlite3
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.envs import ToolEnv, close_env, refuse_calls, reset_env, schemas, score_env, step_env
from turnwise.envs.rewards import Rubric
from turnwise.errors import EnvError, TaskError, ToolError
from turnwise.tasks import Task
from turnwise.tools import BaseTool, ToolResponse, function_tool
from turnwise.types import ToolCall

WAIT = 20.0


def plain(a: int) -> int:
    """Twice."""
    return 2 * a


class Purse(BaseTool):
    log: list[str]

    def __init__(self):
        super().__init__({}, {"name": "purse", "parameters": {"type": "object", "properties": {}}})
        self.log = []

    async def create(self, instance_id=None, **kwargs):
        self.log.append("create")
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse("coin"), 0.5, {"coins": 1}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.25

    async def release(self, instance_id, **kwargs):
        self.log.append("release")


class Counter(ToolEnv):
    """Counts up; the answer is the count."""

    def __init__(self):
        self.purse = Purse()
        self.tools = [plain, self.purse]
        self.scored = []

    def reset(self, task=None, *, seed=None):
        self.count = seed or 0
        return "count", {}

    @function_tool(inline=True)
    def up(self, by: int = 1) -> str:
        """Count up."""
        if by < 0:
            raise ToolError("only up")
        self.count += by
        return str(self.count)

    def score(self, final):
        self.scored.append(final)
        return float(final is not None and final["content"] == str(self.count))


def says(*calls, content=""):
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            call if isinstance(call, ToolCall) else ToolCall(f"c{number}", *call) for number, call in enumerate(calls)
        ]
    return message


UP, BAD = ("up", {"by": 1}), ("down", {})


async def begun(env=None, **keywords):
    env = Counter() if env is None else env
    await reset_env(env, **keywords)
    return env


class TestStep:
    async def test_every_call_is_answered_in_order(self):
        env = await begun(seed=5)
        result = await env.step(
            says(
                UP,
                ("plain", {"a": 4}),
                ("up", {"by": -1}),
                BAD,
                ToolCall("mine", "up", {}, "{", "the arguments are not JSON"),
            )
        )
        assert [message["role"] for message in result.observation] == ["tool"] * 5
        assert [message["tool_call_id"] for message in result.observation] == ["c0", "c1", "c2", "c3", "mine"]
        assert [message["name"] for message in result.observation] == ["up", "plain", "up", "down", "up"]
        contents = [message["content"] for message in result.observation]
        assert contents[:2] == ["6", "8"]
        assert [json.loads(content)["error"]["type"] for content in contents[2:]] == [
            "tool_error",
            "unknown_tool",
            "invalid_json",
        ]
        assert (result.reward, result.terminated, result.truncated) == (0.0, False, False)
        metrics = result.info["metrics"]
        assert metrics.pop("tool_seconds") >= 0
        assert metrics == {
            "tool_calls": 5.0,
            "tool_errors": 3.0,
            "tool_calls/up": 3.0,
            "tool_calls/plain": 1.0,
            "tool_calls/(unknown)": 1.0,
            "tool_failures/up": 2.0,
            "tool_failures/(unknown)": 1.0,
            "tool_errors/tool_error": 1.0,
            "tool_errors/unknown_tool": 1.0,
            "tool_errors/invalid_json": 1.0,
        }

    async def test_rewards_of_tools_are_summed_by_name(self):
        env = await begun()
        result = await env.step(says(("purse", {}), UP, ("purse", {})))
        assert result.reward == 1.0
        assert result.info["rewards"] == {"tool/purse": 1.0}
        assert result.info["metrics"]["purse/coins"] == 2.0

    async def test_the_final_answer_is_scored_once_with_the_tools_rewards(self):
        env = await begun(seed=3)
        final = says(content="3")
        result = await env.step(final)
        assert (result.observation, result.reward, result.terminated, result.truncated) == ([], 1.25, True, False)
        assert result.info["rewards"] == {"score": 1.0, "tool/purse": 0.25}
        assert env.scored == [final]
        with pytest.raises(EnvError, match="Counter: the episode is over: call reset"):
            await env.step(says(UP))
        with pytest.raises(EnvError, match="over"):
            await env.call(ToolCall("c", "up", {}))
        assert env.scored == [final]

    async def test_a_score_in_parts(self):
        class Parts(Counter):
            def score(self, final):
                return {"right": 1.0, "short": -0.5}

        env = await begun(Parts())
        result = await env.step(says(content="x"))
        assert result.reward == 0.75
        assert result.info["rewards"] == {"right": 1.0, "short": -0.5, "tool/purse": 0.25}

    async def test_step_before_reset_raises_env_error(self):
        with pytest.raises(EnvError, match="the episode has not begun: call reset"):
            await Counter().step(says(UP))

    async def test_truncated_message_without_calls_is_final(self):
        env = await begun()
        result = await env.step({"role": "assistant", "content": "0 and", "finish_reason": "length", "tool_calls": []})
        assert result.terminated
        assert result.reward == 0.25

    async def test_a_score_that_raises_is_an_env_error(self):
        class Broken(Counter):
            async def score(self, final):
                raise KeyError("gold")

        env = await begun(Broken())
        with pytest.raises(EnvError, match=r"Broken\.score raised KeyError"):
            await env.step(says(content="x"))


class TestCall:
    async def test_call_returns_the_tools_response(self):
        env = await begun()
        response = await env.call(ToolCall("c", "up", {"by": 2}))
        assert response == ToolResponse("2")
        assert (await env.call(ToolCall("c", "nope", {}))).error == "unknown_tool"
        assert (await env.call(ToolCall("c", "purse", {}))).reward == 0.5


class TestInvalidCalls:
    async def test_max_invalid_calls_in_a_row_truncate(self):
        env = await begun()
        for _ in range(2):
            assert not (await env.step(says(BAD, BAD, BAD, BAD))).truncated
        result = await env.step(says(BAD))
        assert (result.truncated, result.terminated) == (True, False)
        assert result.info["stop_reason"] == "invalid_calls"
        assert len(result.observation) == 1
        assert env.scored == []
        with pytest.raises(EnvError, match="over"):
            await env.step(says(UP))

    async def test_usable_call_resets_the_count_of_invalid_calls(self):
        env = await begun()
        for _ in range(3):
            for _ in range(2):
                assert not (await env.step(says(BAD))).truncated
            assert not (await env.step(says(BAD, UP))).truncated
        assert env.invalid_in_a_row == 0

    async def test_a_tool_that_raised_was_reached(self):
        env = await begun()
        for _ in range(5):
            assert not (await env.step(says(("up", {"by": -1})))).truncated

    async def test_max_invalid_calls_of_zero_never_truncates(self):
        env = Counter()
        env.max_invalid_calls = 0
        await begun(env)
        for _ in range(20):
            assert not (await env.step(says(BAD))).truncated

    async def test_single_calls_count_too(self):
        env = await begun()
        await env.call(ToolCall("c", "nope", {}))
        await env.call(ToolCall("c", "up", {"by": "x"}))
        assert env.invalid_in_a_row == 2
        await env.call(ToolCall("c", "up", {}))
        assert env.invalid_in_a_row == 0


class TestEpisodes:
    async def test_base_tools_live_as_long_as_the_episode(self):
        env = await begun()
        await env.step(says(UP))
        await env.step(says(("purse", {})))
        assert env.purse.log == ["create"]
        await close_env(env)
        await close_env(env)
        assert env.purse.log == ["create", "release"]

    async def test_an_episode_that_is_reset_half_way(self):
        env = await begun()
        await env.step(says(BAD))
        await env.step(says(("purse", {})))
        await env.step(says(BAD))
        await reset_env(env, seed=7)
        assert env.invalid_in_a_row == 0
        await env.step(says(("purse", {})))
        assert env.purse.log == ["create", "release", "create"]
        assert env.count == 7
        await env.close()
        assert env.purse.log == ["create", "release", "create", "release"]

    async def test_reset_called_directly_begins_an_episode_too(self):
        env = Counter()
        assert env.reset(seed=2) == ("count", {})
        assert (await env.step(says(UP))).observation[0]["content"] == "3"
        await env.step(says(content="3"))
        env.reset(None, seed=4)
        assert (await env.step(says(content="4"))).reward == 1.25
        await env.close()
        assert env.purse.log == ["create", "release"] * 2

    async def test_an_async_reset_and_super(self):
        class Child(Counter):
            async def reset(self, task=None, *, seed=None):
                observation, info = super().reset(task, seed=seed)
                return observation + " async", info

        env = Child()
        assert await env.reset(seed=1) == ("count async", {})
        assert (await reset_env(env, seed=1))[0][0]["content"] == "count async"
        assert (await env.step(says(UP))).observation[0]["content"] == "2"

    async def test_overridden_close_still_releases_tools(self):
        class Closing(Counter):
            def close(self):
                raise OSError("stuck")

        env = await begun(Closing())
        await env.step(says(UP))
        with pytest.raises(EnvError, match="stuck"):
            await close_env(env)
        assert env.purse.log == ["create", "release"]

    async def test_step_after_close_raises_env_error(self):
        env = await begun()
        await env.close()
        with pytest.raises(EnvError, match="has not begun"):
            await env.step(says(UP))

    async def test_the_score_of_an_episode_nobody_stepped_in(self):
        env = await begun()
        assert await score_env(env, None) == {"score": 0.0}
        assert env.purse.log == []

    async def test_without_a_reset_of_its_own_the_prompt_is_the_tasks(self):
        class Bare(ToolEnv):
            tools = (plain,)

        env = Bare()
        messages, _ = await reset_env(env, Task("a", "hi"))
        assert messages == [{"role": "user", "content": "hi"}]
        assert (await env.step(says(("plain", {"a": 1})))).observation[0]["content"] == "2"
        with pytest.raises(EnvError, match=r"Bare\.reset got no task"):
            await reset_env(env)

    async def test_tools_may_depend_on_the_episode(self):
        class Varying(ToolEnv):
            def reset(self, task=None, *, seed=None):
                self.tools = [plain] if seed else []
                return "hi", {}

        env = Varying()
        await reset_env(env, seed=1)
        assert [schema.name for schema in schemas(env)] == ["plain"]
        await env.step(says(("plain", {"a": 1})))
        await reset_env(env, seed=0)
        assert schemas(env) == []
        assert "unknown_tool" in (await env.step(says(("plain", {"a": 1})))).observation[0]["content"]

    def test_schemas_in_order(self):
        assert [schema.name for schema in schemas(Counter())] == ["up", "plain", "purse"]


class TestTasksKwargs:
    async def test_create_kwargs_of_the_task_reach_the_tool(self):
        seen = {}

        class Keyed(Purse):
            async def create(self, instance_id=None, **kwargs):
                seen.update(kwargs)
                return "id", ToolResponse()

        class KeyedEnv(ToolEnv):
            tools = (Keyed,)

        env = KeyedEnv()
        task = Task("a", "hi", {"tools_kwargs": {"purse": {"create_kwargs": {"gold": 3}}}})
        await reset_env(env, task)
        await env.step(says(("purse", {})))
        assert seen == {"gold": 3, "create_kwargs": {"gold": 3}}

    @pytest.mark.parametrize(
        ("kwargs", "words"), [({"sack": {}}, "names 'sack', but the tools are up"), ([1], "must be an object")]
    )
    async def test_wrong_tool_kwargs_raise_task_errors(self, kwargs, words):
        env = await begun(task=Task("row-3", "hi", {"tools_kwargs": kwargs}))
        with pytest.raises(TaskError, match=f"task 'row-3'.*{words}"):
            await env.step(says(UP))


class TestLostThreads:
    async def test_a_plain_tool_past_its_time_out_ends_the_episode_unscored(self):
        release = threading.Event()

        class Slow(Counter):
            @function_tool(timeout=0.5)
            def hang(self) -> str:
                """Hang."""
                release.wait(WAIT)
                return ""

        env = await begun(Slow())
        result = await env.step(says(("hang", {}), UP))
        release.set()
        assert env.lost_thread
        assert (result.terminated, result.truncated, result.info["stop_reason"]) == (False, True, "timeout")
        assert [json.loads(message["content"])["error"]["type"] for message in result.observation] == ["timeout"] * 2
        assert env.count == 0
        assert env.scored == []

    async def test_an_async_tool_past_its_time_out_does_not(self):
        class Slow(Counter):
            tool_timeout = 0.01

            @function_tool
            async def hang(self) -> str:
                """Hang."""
                await asyncio.Event().wait()
                return ""

        env = await begun(Slow())
        result = await env.step(says(("hang", {}), UP))
        assert not env.lost_thread
        assert not result.truncated
        assert result.observation[1]["content"] == "1"


class TestEnding:
    async def test_a_tool_that_submits(self):
        class Submitting(Counter):
            submitted = False

            @function_tool
            async def submit(self) -> str:
                """Hand in."""
                self.submitted = True
                return "handed in"

            async def step(self, action):
                result = await super().step(action)
                return await self.final_step(action, result.observation) if self.submitted else result

        env = await begun(Submitting())
        result = await step_env(env, says(("submit", {})))
        assert result.terminated
        assert [message["content"] for message in result.observation] == ["handed in"]
        assert len(env.scored) == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["by", "a", ""]), inner, max_size=2),
    max_leaves=5,
)
CALLS = st.builds(
    ToolCall,
    id=st.text(max_size=3),
    name=st.one_of(st.sampled_from(["up", "plain", "purse"]), st.text(max_size=4)),
    arguments=VALUES,
    raw=st.binary(max_size=6).map(lambda data: data.decode("utf-8", "surrogateescape")),
    error=st.one_of(st.none(), st.text(max_size=4)),
)


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(st.lists(CALLS, min_size=1, max_size=4), min_size=1, max_size=3))
def test_step_answers_every_kind_of_call(messages):
    async def main():
        env = Counter()
        env.max_invalid_calls = 0
        env.reset()
        for calls in messages:
            result = await step_env(env, says(*calls))
            assert [message["tool_call_id"] for message in result.observation] == [call.id for call in calls]
            assert result.info["metrics"]["tool_calls"] == len(calls)
            for message in result.observation:
                message["content"].encode()
        await env.close()
        assert env.purse.log == ["create", "release"]

    asyncio.run(main())


class Stock(ToolEnv):
    """Its table is opened in reset, on the event loop, and used by a plain tool and a plain reward function."""

    def reset(self, task=None, *, seed=None):
        self.table = sqlite3.connect(":memory:")
        return "How many?", {}

    @function_tool
    def count(self) -> int:
        """Count."""
        return self.table.execute("SELECT 7").fetchone()[0]

    @function_tool(inline=True)
    def count_inline(self) -> int:
        """Count."""
        return self.table.execute("SELECT 7").fetchone()[0]

    async def score(self, final):
        return await Rubric({"right": lambda env: env.table.execute("SELECT 1.0").fetchone()[0]}).score(
            self, None, None
        )


async def test_sqlite_of_another_thread_is_named_with_its_remedies():
    env = Stock()
    await reset_env(env)
    answers = []
    for name in ("count", "count", "count_inline"):
        action = {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", name, {})]}
        answers.append((await step_env(env, action)).observation[0]["content"])
    assert "another thread" in answers[0]
    assert "inline=True" in answers[0]
    assert "check_same_thread=False" in answers[0]
    # SQLite's own message numbers the threads: two episodes would differ.
    assert answers == [answers[0], answers[0], "7"]
    with pytest.raises(EnvError, match=r"'right' .*another thread.*check_same_thread=False"):
        await score_env(env, None)


async def test_plain_env_answers_calls_of_tools_that_it_never_offered():
    action = {"role": "assistant", "content": "", "tool_calls": [ToolCall("c1", "look", {}), ToolCall("c2", "go", {})]}
    answers = refuse_calls(action)
    assert [answer["tool_call_id"] for answer in answers] == ["c1", "c2"]
    assert json.loads(answers[0]["content"])["error"]["message"] == "there is no tool 'look'"
    assert refuse_calls({"role": "assistant", "content": "north"}) == []
