"""The contract of environments, and the one way in which others call them."""

import threading

import numpy as np
import pytest

from turnwise.envs import Env, StepResult, as_messages, close_env, reset_env, schemas, score_env, step_env
from turnwise.errors import ConfigError, EnvError, ToolSchemaError
from turnwise.tools import ToolThreads, function_tool


class Given(Env):
    """Returns preset results."""

    def __init__(self, **results):
        self.results = results
        self.calls = []
        self.released = 0

    def _give(self, name):
        self.calls.append((name, threading.current_thread()))
        result = self.results.get(name)
        if isinstance(result, BaseException):
            raise result
        return result

    def reset(self, task=None, *, seed=None):
        return self._give("reset")

    def step(self, action):
        return self._give("step")

    def score(self, final):
        return self._give("score")

    def close(self):
        return self._give("close")

    async def release(self):
        self.released += 1


class Async(Given):
    async def reset(self, task=None, *, seed=None):
        return self._give("reset")

    async def step(self, action):
        return self._give("step")

    async def score(self, final):
        return self._give("score")

    async def close(self):
        return self._give("close")


class Blocking(Given):
    blocking = True


KINDS = pytest.mark.parametrize("kind", [Given, Async, Blocking])
ACTION = {"role": "assistant", "content": ""}


class TestInvoke:
    @KINDS
    async def test_plain_async_and_blocking(self, kind):
        env = kind(reset=("hi", {"k": 1}), step=StepResult("yo", 1, False, False, {}), score=0.5)
        assert await reset_env(env, None, seed=1) == ([{"role": "user", "content": "hi"}], {"k": 1})
        assert await step_env(env, ACTION) == ([{"role": "user", "content": "yo"}], 1.0, False, False, {})
        assert await score_env(env, None) == {"score": 0.5}
        await close_env(env)
        elsewhere = [thread is not threading.current_thread() for _, thread in env.calls]
        assert elsewhere == [kind is Blocking] * 4

    async def test_blocking_methods_run_in_the_given_executor(self):
        executor = ToolThreads(1)
        env = Blocking(score=1.0)
        await score_env(env, None, executor=executor)
        await score_env(env, None)
        threads = {thread for _, thread in env.calls}
        assert threads == {executor.submit(threading.current_thread).result(20)}
        executor.shutdown()

    @KINDS
    @pytest.mark.parametrize(
        "raised",
        [ValueError("why"), StopIteration("why"), SystemExit("why"), KeyError("why"), pytest.fail.Exception("why")],
    )
    async def test_exceptions_of_methods_become_env_errors_with_their_name(self, kind, raised):
        with pytest.raises(EnvError, match=rf"{kind.__name__}\.step raised \w+: .*(why|StopIteration)") as error:
            await step_env(kind(step=raised), ACTION)
        assert error.value.__cause__ is not None

    @KINDS
    async def test_errors_of_the_package_are_raised_unchanged(self, kind):
        with pytest.raises(ConfigError, match="as it is"):
            await score_env(kind(score=ConfigError("as it is")), None)

    async def test_a_method_that_is_not_written(self):
        with pytest.raises(EnvError, match=r"Env defines no reset\(\)"):
            await reset_env(Env())

    @KINDS
    async def test_close_releases_whatever_happens(self, kind):
        env = kind(close=OSError("stuck"))
        with pytest.raises(EnvError, match="stuck"):
            await close_env(env)
        assert env.released == 1

    async def test_defaults(self):
        env = Env()
        assert await score_env(env, None) == {"score": 0.0}
        assert await close_env(env) is None
        assert schemas(env) == []


class TestResults:
    @pytest.mark.parametrize(
        ("result", "words"),
        [
            (None, "it must return \\(observation, info\\)"),
            ("hi", "observation, info"),
            (("hi",), "observation, info"),
            (("hi", None), "info None"),
            ((3, {}), "observation"),
            (([{"content": "x"}], {}), r"observation\[0\].*role"),
            (([{"role": "user", "content": 3}], {}), r"observation\[0\]\['content'\] is 3"),
        ],
    )
    async def test_reset(self, result, words):
        with pytest.raises(EnvError, match=f"Given.reset.*{words}"):
            await reset_env(Given(reset=result))

    @pytest.mark.parametrize(
        ("result", "words"),
        [
            (None, "StepResult"),
            (("a", 0, False, False), "StepResult"),
            (("a", float("nan"), False, False, {}), "reward nan"),
            (("a", 10**400, False, False, {}), "reward 1000"),
            (("a", None, False, False, {}), "reward None"),
            (("a", "1", False, False, {}), "reward '1'"),
            (("a", 0, 0.0, False, {}), "terminated=0.0"),
            (("a", 0, None, False, {}), "terminated=None"),
            (("a", 0, False, {}, {}), "truncated={}"),
            (("a", 0, False, "no", {}), "truncated='no'"),
            (("a", 0, False, False, []), r"info \[\]"),
            ((3, 0, False, False, {}), "observation"),
            (("a", 0, False, False, {"rewards": {"x": float("inf")}}), r"info\['rewards'\]\['x'\] inf"),
            (("a", 0, False, False, {"metrics": [1]}), r"info\['metrics'\] is \[1\]"),
            (("a", 0, False, True, {"stop_reason": "bored"}), "'bored': allowed are completed"),
        ],
    )
    async def test_step(self, result, words):
        with pytest.raises(EnvError, match=f"Given.step.*{words}"):
            await step_env(Given(step=result), ACTION)

    async def test_numpys_numbers_and_flags_are_fine(self):
        env = Given(step=("a", np.float32(0.5), np.bool_(True), np.bool_(False), {}), score=np.float64(1))
        result = await step_env(env, ACTION)
        assert (result.reward, result.terminated, result.truncated) == (0.5, True, False)
        assert type(result.reward) is float
        assert type(result.terminated) is bool
        assert await score_env(env, None) == {"score": 1.0}

    @pytest.mark.parametrize("result", [None, "1", float("nan"), {"a": float("nan")}, {1: 0.5}, {"a": "x"}, [1.0]])
    async def test_score(self, result):
        with pytest.raises(EnvError, match=r"Given\.score returned"):
            await score_env(Given(score=result), None)

    async def test_a_score_in_parts(self):
        assert await score_env(Given(score={"a": 1, "b": 0.5}), None) == {"a": 1.0, "b": 0.5}


class TestAsMessages:
    def test_forms(self):
        message = {"role": "tool", "content": "x"}
        assert as_messages("hi") == [{"role": "user", "content": "hi"}]
        assert as_messages(message) == [message]
        assert as_messages([message]) == [message]
        assert as_messages([]) == []

    def test_the_list_is_new(self):
        messages = []
        assert as_messages(messages) is not messages

    @pytest.mark.parametrize("value", [None, 3, [3], [{"role": "robot"}], {"content": "x"}])
    def test_anything_else(self, value):
        with pytest.raises(EnvError):
            as_messages(value)


class TestToolMethods:
    def test_found_through_inheritance_in_order(self):
        class Mixin:
            @function_tool
            def mixed(self) -> str:
                return ""

        class Parent(Env):
            @function_tool
            def first(self) -> str:
                return ""

            @function_tool("renamed")
            def second(self) -> str:
                return ""

        class Child(Mixin, Parent):
            @function_tool
            def first(self, a: int) -> str:
                return "child"

        assert list(Parent.tool_methods) == ["first", "renamed"]
        assert sorted(Child.tool_methods) == ["first", "mixed", "renamed"]
        assert Child.tool_methods["first"] is Child.first
        assert Parent.tool_methods["first"] is Parent.first

    def test_a_static_method(self):
        class Owner(Env):
            @staticmethod
            @function_tool
            def pure(a: int) -> int:
                return a

        assert not Owner.tool_methods["pure"].is_method

    def test_attribute_replacing_a_tool_raises_schema_error(self):
        class Parent(Env):
            @function_tool
            def tool(self) -> str:
                return ""

        with pytest.raises(ToolSchemaError, match=r"Child\.tool replaces a tool.*@function_tool, or write tool = None"):

            class Child(Parent):
                def tool(self) -> str:
                    return ""

    def test_none_takes_a_tool_away(self):
        class Parent(Env):
            @function_tool
            def tool(self) -> str:
                return ""

        class Child(Parent):
            tool = None

        assert Child.tool_methods == {}

    def test_two_tools_with_equal_names_raise_schema_error(self):
        with pytest.raises(ToolSchemaError, match="another of its tools is called 'same'"):

            class Owner(Env):
                @function_tool("same")
                def one(self) -> str:
                    return ""

                @function_tool("same")
                def two(self) -> str:
                    return ""

        def one() -> str:
            return ""

        class Other(Env):
            tools = (one,)

            @function_tool("one")
            def method(self) -> str:
                return ""

        with pytest.raises(ToolSchemaError, match="Other has two tools called 'one'"):
            schemas(Other())
