"""Running calls: one answer each, in order; who runs beside whom; time-outs; the life of BaseTools; return values."""

import asyncio
import contextlib
import contextvars
import dataclasses
import json
import signal
import sys
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.errors import EnvError, InferenceError, ToolError
from turnwise.tools import BaseTool, FunctionTool, ToolResponse, ToolRunner, ToolThreads, as_tool, function_tool
from turnwise.types import ToolCall

WAIT = 20.0


def runner(*tools, **keywords):
    tools = [as_tool(tool) for tool in tools]
    return ToolRunner({tool.name: tool for tool in tools}, **keywords)


def call(name, *, call_id="c", **arguments):
    return ToolCall(call_id, name, arguments)


async def answer(tool, **arguments):
    tool = as_tool(tool)
    return (await runner(tool).run(call(tool.name, **arguments))).response


def error_of(response):
    return json.loads(response.text)["error"]


@function_tool(inline=True)
def add(a: int, b: int = 1) -> int:
    return a + b


class Base(BaseTool):
    def __init__(self, name="base", log=None, **faults):
        super().__init__({}, {"name": name, "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}})
        self.log = [] if log is None else log
        self.faults = faults

    def _fault(self, where):
        if where in self.faults:
            raise self.faults[where]

    async def create(self, instance_id=None, **kwargs):
        self.log.append(("create", self.name, kwargs))
        await asyncio.sleep(0)
        self._fault("create")
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        self.log.append(("execute", self.name, parameters, kwargs))
        self._fault("execute")
        return ToolResponse("done"), 0.5, {"n": 1}

    async def calc_reward(self, instance_id, **kwargs):
        self.log.append(("calc_reward", self.name, kwargs))
        self._fault("calc_reward")
        return 0.25

    async def release(self, instance_id, **kwargs):
        self.log.append(("release", self.name, kwargs))
        self._fault("release")


class TestAnswers:
    async def test_result_of_a_function_is_its_text(self):
        assert (await answer(add, a=2)).text == "3"

    @pytest.mark.parametrize(
        ("model_call", "word", "details"),
        [
            (ToolCall("c", "ad", {}), "unknown_tool", {"available": ["add"]}),
            (ToolCall("c", "add", {}, "{", "the arguments are not JSON"), "invalid_json", {"tool": "add"}),
            (ToolCall("c", "add", {}, "", "it stands inside reasoning"), "unusable_call", {"tool": "add"}),
            (ToolCall("c", "", {}, "", "it has no name"), "unusable_call", {"available": ["add"]}),
            (ToolCall("c", "add", {"a": "x"}), "invalid_arguments", {"tool": "add", "path": "$.a"}),
            (ToolCall("c", "add", {}), "invalid_arguments", {"tool": "add", "path": "$"}),
        ],
    )
    async def test_unusable_calls_never_reach_a_tool(self, model_call, word, details):
        outcome = await runner(add).run(model_call)
        assert not outcome.usable
        assert outcome.response.error == word
        body = error_of(outcome.response)
        assert body["type"] == word
        assert body["message"]
        assert {key: body[key] for key in details} == details

    async def test_a_call_with_an_error_is_not_executed_even_if_its_arguments_fit(self):
        ran = []
        tool = FunctionTool(lambda: ran.append(1), name="f")
        outcome = await runner(tool).run(ToolCall("c", "f", {}, "{}", "it stands inside reasoning"))
        assert outcome.response.error == "unusable_call"
        assert ran == []

    @pytest.mark.parametrize(
        "model_call",
        [
            ToolCall("c", "n" * 100_000, {}),
            ToolCall("c", "add", {"a": "9" * 100_000}),
            ToolCall("c", "add", {"a": 1, "k" * 100_000: 1}),
            ToolCall("c", "add", {}, "", "the call is not JSON: " + "x" * 100_000),
        ],
    )
    async def test_a_models_own_words_are_quoted_short(self, model_call):
        outcome = await runner(add).run(model_call)
        assert not outcome.usable
        assert len(outcome.response.text) < 4500

    async def test_a_path_is_short_too(self):
        def deep(counts: dict[str, int]) -> str:
            return ""

        outcome = await runner(deep).run(call("deep", counts={"k" * 100_000: "x"}))
        assert error_of(outcome.response)["path"].startswith("$.")
        assert len(outcome.response.text) < 1000

    async def test_a_tool_error_is_its_text(self):
        async def fails() -> str:
            raise ToolError("no such file 'ä'")

        response = await answer(fails)
        assert (response.error, error_of(response)["message"]) == ("tool_error", "no such file 'ä'")
        assert response.metrics == {}

    @pytest.mark.parametrize(
        "kind",
        [
            KeyError,
            StopIteration,
            SystemExit,
            pytest.fail.Exception,
            TimeoutError,
            RecursionError,
            asyncio.CancelledError,
        ],
    )
    @pytest.mark.parametrize("form", ["thread", "inline", "async"])
    async def test_any_other_exception_is_answered_and_counted(self, kind, form):
        def plain() -> str:
            raise kind("boom")

        async def coroutine() -> str:
            raise kind("boom")

        tool = FunctionTool(coroutine) if form == "async" else FunctionTool(plain, inline=form == "inline")
        response = await answer(tool)
        assert response.error == "tool_error"
        assert response.metrics == {"crashes": 1.0}
        named = error_of(response)["message"]
        assert kind.__name__ in named or (kind is StopIteration and "StopIteration" in named)

    @pytest.mark.parametrize("form", ["thread", "inline", "async"])
    async def test_an_error_of_the_infrastructure_ends_the_episode(self, form):
        def plain() -> str:
            raise InferenceError("the judge's server is gone")

        async def coroutine() -> str:
            raise InferenceError("the judge's server is gone")

        tool = FunctionTool(coroutine) if form == "async" else FunctionTool(plain, inline=form == "inline")
        with pytest.raises(InferenceError):
            await answer(tool)

    async def test_context_variables_reach_threads(self):
        variable = contextvars.ContextVar("variable", default="unset")
        variable.set("set")

        def reads() -> str:
            return variable.get()

        assert (await answer(reads)).text == "set"

    async def test_output_is_cut_in_the_middle(self):
        @function_tool(max_output=100)
        def long() -> str:
            return "a" * 500 + "z" * 500

        text = (await answer(long)).text
        assert len(text) <= 100
        assert text.startswith("aaa")
        assert text.endswith("zzz")
        assert "characters cut" in text

    async def test_half_a_surrogate_pair_is_replaced(self):
        def bad() -> str:
            return "a\ud800b"

        response = await answer(bad)
        assert response.text.encode().decode() == "a?b"
        unknown = await runner(add).run(ToolCall("c", "\ud800", {}))
        unknown.response.text.encode()

    async def test_a_shared_response_is_not_changed(self):
        shared = ToolResponse("x" * 100)

        @function_tool(max_output=20)
        def same() -> ToolResponse:
            return shared

        assert len((await answer(same)).text) <= 20
        assert len(shared.text) == 100


class Model(pydantic.BaseModel):
    a: int


@dataclasses.dataclass
class Data:
    a: int
    b: Model


Named = namedtuple("Named", "a b")


class TestReturnValues:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("text", "text"),
            (None, ""),
            (3, "3"),
            (0.5, "0.5"),
            (True, "true"),
            ({"ä": [1, None]}, '{"ä": [1, null]}'),
            ([1, "a"], '[1, "a"]'),
            (Model(a=1), '{"a": 1}'),
            (Data(1, Model(a=2)), '{"a": 1, "b": {"a": 2}}'),
            (Named(1, 2), '{"a": 1, "b": 2}'),
            (b"by\xfftes", "by�tes"),
            (("text",), "text"),
            (([1],), "[1]"),
        ],
    )
    async def test_returned_values_become_text(self, value, text):
        response = await answer(FunctionTool(lambda: value, name="f"))
        assert response == ToolResponse(text)

    async def test_rewards_and_metrics(self):
        for value in [
            ("t", 0.5, {"n": 2}),
            (ToolResponse("t", metrics={"n": 2}), 0.5),
            ToolResponse("t", reward=0.5, metrics={"n": 2}),
        ]:
            response = await answer(FunctionTool(lambda value=value: value, name="f", schema={"name": "f"}))
            assert (response.text, response.reward, response.metrics) == ("t", 0.5, {"n": 2.0})

    async def test_no_reward_is_not_a_reward_of_zero(self):
        assert (await answer(FunctionTool(lambda: ("t", None), name="f"))).reward is None
        assert (await answer(FunctionTool(lambda: ("t", 0), name="f"))).reward == 0.0

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ((), "a tuple of 0"),
            ((1, 2, {}, 4), "a tuple of 4"),
            (("t", float("nan")), "reward is nan"),
            (("t", float("inf")), "reward is inf"),
            (("t", "high"), "reward is 'high'"),
            (("t", 1, [1]), "metrics of type list"),
            ((ToolResponse(reward=1.0), 2.0), "two rewards"),
            (object(), "type object"),
            ({"a": object()}, "type dict"),
        ],
    )
    async def test_broken_contracts_are_the_tools_authors(self, value, words):
        with pytest.raises(EnvError, match=words):
            await answer(FunctionTool(lambda: value, name="f"))

    async def test_a_plain_function_may_return_an_awaitable(self):
        async def later():
            return "later"

        tool = FunctionTool(lambda: later(), name="f")  # noqa: PLW0108 - the tool is the plain function around it
        assert (await answer(tool)).text == "later"


class TestConcurrency:
    async def test_function_tools_of_a_message_run_concurrently(self):
        together = asyncio.Barrier(3)

        async def meet(n: int) -> int:
            async with asyncio.timeout(WAIT):
                await together.wait()
            return n

        outcomes = await runner(meet).run_all([call("meet", n=n) for n in range(3)])
        assert [outcome.response.text for outcome in outcomes] == ["0", "1", "2"]

    async def test_plain_functions_run_together_in_threads(self):
        together = threading.Barrier(3)

        def meet(n: int) -> int:
            together.wait(WAIT)
            return n

        outcomes = await runner(meet).run_all([call("meet", n=n) for n in range(3)])
        assert [outcome.response.text for outcome in outcomes] == ["0", "1", "2"]

    async def test_stateful_tools_run_sequentially_in_call_order(self):
        running, log = [], []

        class Owner:
            @function_tool
            async def slow(self, n: int) -> str:
                running.append(n)
                assert running == [n]
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                running.remove(n)
                log.append(n)
                return str(n)

            @function_tool
            def threaded(self, n: int) -> str:
                assert running == []
                log.append(n)
                return str(n)

            @function_tool(inline=True)
            def quick(self, n: int) -> str:
                assert running == []
                log.append(n)
                return str(n)

        async def beside() -> str:
            return "beside"

        tools = {"slow": Owner.slow, "threaded": Owner.threaded, "quick": Owner.quick, "beside": as_tool(beside)}
        tool_runner = ToolRunner(tools, owner=Owner())
        names = ["slow", "beside", "threaded", "slow", "quick", "threaded", "beside", "slow"]
        calls = [call(name, call_id=str(n), **({} if name == "beside" else {"n": n})) for n, name in enumerate(names)]
        outcomes = await tool_runner.run_all(calls)
        assert [outcome.call.id for outcome in outcomes] == [str(n) for n in range(8)]
        assert [outcome.response.error for outcome in outcomes] == [None] * 8
        assert log == [0, 2, 3, 4, 5, 7]

    async def test_single_calls_of_an_episode_keep_their_order_too(self):
        log = []

        class Owner:
            @function_tool
            async def slow(self, n: int) -> str:
                log.append(("in", n))
                await asyncio.sleep(0)
                log.append(("out", n))
                return ""

        tool_runner = ToolRunner({"slow": Owner.slow}, owner=Owner())
        await asyncio.gather(*(tool_runner.run(call("slow", n=n)) for n in range(4)))
        assert log == [(side, n) for n in range(4) for side in ("in", "out")]

    async def test_a_method_that_is_declared_concurrent(self):
        together = asyncio.Barrier(2)

        class Owner:
            @function_tool(concurrent=True)
            async def meet(self) -> str:
                async with asyncio.timeout(WAIT):
                    await together.wait()
                return "met"

        outcomes = await ToolRunner({"meet": Owner.meet}, owner=Owner()).run_all([call("meet"), call("meet")])
        assert [outcome.response.text for outcome in outcomes] == ["met", "met"]

    async def test_tool_may_call_another_tool_of_its_episode(self):
        class Owner:
            made: ToolRunner

            @function_tool
            async def inner(self) -> str:
                return "inner"

            @function_tool
            async def outer(self) -> str:
                return "outer " + (await self.made.run(call("inner"))).response.text

        owner = Owner()
        owner.made = ToolRunner({"inner": Owner.inner, "outer": Owner.outer}, owner=owner)
        async with asyncio.timeout(WAIT):
            assert (await owner.made.run(call("outer"))).response.text == "outer inner"

    async def test_error_of_a_call_is_raised_after_all_calls_end(self):
        finished = []

        async def breaks() -> str:
            raise EnvError("gone")

        async def works() -> str:
            await asyncio.sleep(0)
            finished.append(1)
            return ""

        with pytest.raises(EnvError, match="gone"):
            await runner(breaks, works).run_all([call("breaks"), call("works")])
        assert finished == [1]

    async def test_inline_tools_run_on_the_loop_and_others_do_not(self):
        seen = {}

        @function_tool(inline=True)
        def inline() -> str:
            seen["inline"] = threading.current_thread()
            return ""

        @function_tool
        def threaded() -> str:
            seen["threaded"] = threading.current_thread()
            return ""

        await runner(inline, threaded).run_all([call("inline"), call("threaded")])
        assert seen["inline"] is threading.current_thread()
        assert seen["threaded"] is not threading.current_thread()

    @pytest.mark.parametrize("executor", [ToolThreads(1), ThreadPoolExecutor(1)])
    async def test_an_executor_may_be_given(self, executor):
        def where() -> str:
            return str(threading.get_ident())

        tool_runner = runner(where, executor=executor)
        texts = {(await tool_runner.run(call("where"))).response.text for _ in range(3)}
        assert texts == {str(executor.submit(threading.get_ident).result(WAIT))}
        executor.shutdown()
        with pytest.raises(EnvError, match="rejected the call"):
            await tool_runner.run(call("where"))


class TestTimeouts:
    async def test_an_async_tool_is_really_cancelled(self):
        finished = []

        @function_tool(timeout=0.01)
        async def hangs() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                finished.append(1)
            return ""

        tool_runner = runner(hangs)
        outcome = await tool_runner.run(call("hangs"))
        assert (outcome.response.error, tool_runner.lost, finished) == ("timeout", 0, [1])
        assert outcome.usable
        assert "0.01 s" in error_of(outcome.response)["message"]

    async def test_a_result_in_time_is_a_result(self):
        @function_tool(timeout=WAIT)
        async def quick() -> str:
            await asyncio.sleep(0)
            return "in time"

        assert (await answer(quick)).text == "in time"

    async def test_a_tools_own_time_out_is_a_tool_error(self):
        @function_tool(timeout=WAIT)
        async def own() -> str:
            raise TimeoutError("the page did not load")

        assert (await answer(own)).error == "tool_error"

    async def test_a_tool_that_refuses_to_be_cancelled_is_lost(self, monkeypatch):
        monkeypatch.setattr("turnwise.tools.cancellation.CANCEL_GRACE_S", 0.01)
        release = asyncio.Event()

        @function_tool(timeout=0.01)
        async def stubborn() -> str:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()
            return ""

        tool_runner = runner(stubborn)
        assert (await tool_runner.run(call("stubborn"))).response.error == "timeout"
        assert tool_runner.lost == 1
        release.set()

    @pytest.mark.parametrize("kind", [ToolThreads, ThreadPoolExecutor])
    async def test_the_thread_of_a_plain_tool_is_lost(self, kind):
        executor = kind(2)
        release, ran = threading.Event(), []

        @function_tool(timeout=0.5)
        def hangs() -> str:
            release.wait(WAIT)
            return ""

        def after() -> str:
            ran.append(1)
            return ""

        tool_runner = runner(hangs, FunctionTool(after, concurrent=False), executor=executor)
        outcome = await tool_runner.run(call("hangs"))
        assert (outcome.response.error, tool_runner.lost) == ("timeout", 1)
        # Nothing else of the episode runs beside a thread that nobody can stop.
        later = await tool_runner.run_all([call("after"), call("nothing")])
        assert [outcome.response.error for outcome in later] == ["timeout", "unknown_tool"]
        assert ran == []
        release.set()
        executor.shutdown()

    @pytest.mark.parametrize("ends", ["time-out", "cancelled"])
    async def test_interrupted_tool_runs_its_cleanup(self, ends):
        started = asyncio.Event()
        # Started before the call: how long that takes is the machine's affair, not the tool's.
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)

        @function_tool(timeout=0.2 if ends == "time-out" else WAIT)
        async def shell() -> str:
            started.set()
            try:
                await process.wait()
            finally:
                process.kill()
                await process.wait()
            return ""

        tool_runner = runner(shell)
        task = asyncio.ensure_future(tool_runner.run(call("shell")))
        async with asyncio.timeout(WAIT):
            await started.wait()
            if ends == "cancelled":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                assert (await task).response.error == "timeout"
        # The call was answered after the tool had cleaned up, not while it did.
        assert process.returncode == -signal.SIGKILL
        assert tool_runner.lost == 0

    async def test_a_call_that_waited_for_a_thread_is_not_lost(self):
        executor = ToolThreads(1)
        release = threading.Event()
        blocker = executor.submit(release.wait, WAIT)
        tool_runner = runner(FunctionTool(lambda: "x", name="f", timeout=0.01), executor=executor)
        assert (await tool_runner.run(call("f"))).response.error == "timeout"
        assert tool_runner.lost == 0
        release.set()
        blocker.result(WAIT)
        assert (await tool_runner.run(call("f"))).response.text == "x"
        executor.shutdown()

    async def test_the_episodes_time_out_serves_tools_without_their_own(self):
        async def hangs() -> str:
            await asyncio.Event().wait()
            return ""

        assert (await runner(hangs, timeout=0.01).run(call("hangs"))).response.error == "timeout"

    async def test_cancelling_the_episode_cancels_the_tool(self):
        started, finished = asyncio.Event(), []

        @function_tool(timeout=WAIT)
        async def hangs() -> str:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                finished.append(1)
            return ""

        task = asyncio.ensure_future(runner(hangs).run_all([call("hangs"), call("hangs")]))
        async with asyncio.timeout(WAIT):
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert finished == [1, 1]

    async def test_cancelling_the_episode_gives_its_thread_up(self):
        executor = ToolThreads(1)
        started, release = threading.Event(), threading.Event()

        def hangs() -> str:
            started.set()
            release.wait(WAIT)
            return ""

        tool_runner = runner(hangs, executor=executor)
        task = asyncio.ensure_future(tool_runner.run(call("hangs")))
        await asyncio.to_thread(started.wait, WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (tool_runner.lost, executor.lost) == (1, 1)
        release.set()
        executor.shutdown()


class TestBaseTools:
    async def test_created_once_released_once(self):
        tool = Base()
        tool_runner = runner(tool)
        outcomes = await tool_runner.run_all([call("base", x=1), call("base"), call("base", x="no")])
        assert [outcome.response.error for outcome in outcomes] == [None, None, "invalid_arguments"]
        assert (outcomes[0].response.reward, outcomes[0].response.metrics) == (0.5, {"n": 1.0})
        assert await tool_runner.rewards() == {"tool/base": 0.25}
        await tool_runner.close()
        await tool_runner.close()
        assert [entry[0] for entry in tool.log] == ["create", "execute", "execute", "calc_reward", "release"]
        with pytest.raises(EnvError, match="after the end"):
            await tool_runner.run(call("base"))

    async def test_created_once_by_calls_that_come_together(self):
        tool = Base()
        tool.concurrent = True
        tool_runner = runner(tool)
        await asyncio.gather(*(tool_runner.run(call("base")) for _ in range(5)))
        assert [entry[0] for entry in tool.log].count("create") == 1

    async def test_instances_of_two_episodes_are_two(self):
        tool = Base()
        first, second = runner(tool), runner(tool)
        await first.open()
        await second.open()
        assert first._instances.id_of("base") != second._instances.id_of("base")
        await first.close()
        await second.close()
        assert [entry[0] for entry in tool.log] == ["create", "create", "release", "release"]

    async def test_kwargs_of_the_task_reach_every_method(self):
        tool = Base()
        kwargs = {f"{name}_kwargs": {"from": name} for name in ("create", "execute", "calc_reward", "release")}
        tool_runner = runner(tool, tools_kwargs={"base": kwargs})
        await tool_runner.run(call("base"))
        await tool_runner.rewards()
        await tool_runner.close()
        create, execute, calc_reward, release = (entry[-1] for entry in tool.log)
        assert create == {"from": "create", "create_kwargs": {"from": "create"}}
        assert execute == {"from": "execute", "agent_data": tool_runner.data}
        assert (calc_reward, release) == ({"from": "calc_reward"}, {"from": "release"})

    async def test_a_failing_create_releases_the_others_and_is_an_env_error(self):
        log = []
        tool_runner = runner(Base("one", log), Base("two", log, create=OSError("no disk")))
        with pytest.raises(EnvError, match=r"Base\.create of tool 'two' raised OSError: no disk"):
            await tool_runner.run(call("one"))
        assert [entry[:2] for entry in log] == [("create", "one"), ("create", "two"), ("release", "one")]
        await tool_runner.close()
        assert len(log) == 3

    async def test_a_failing_release_does_not_keep_the_others(self):
        log = []
        tool_runner = runner(Base("one", log), Base("two", log, release=OSError("stuck")), Base("three", log))
        await tool_runner.open()
        with pytest.raises(EnvError, match=r"Base\.release of tool 'two' raised OSError"):
            await tool_runner.close()
        await tool_runner.close()
        assert sorted(entry[1] for entry in log if entry[0] == "release") == ["one", "three", "two"]

    async def test_a_cancelled_release_does_not_keep_the_others_either(self):
        log, started = [], asyncio.Event()

        class Slow(Base):
            async def release(self, instance_id, **kwargs):
                started.set()
                await asyncio.Event().wait()

        # Released in the reverse order of their creation.
        tool_runner = runner(Base("one", log), Slow("two", log))
        await tool_runner.open()
        task = asyncio.ensure_future(tool_runner.close())
        async with asyncio.timeout(WAIT):
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert log[-1][:2] == ("release", "one")

    async def test_a_failing_execute_is_answered_and_still_released(self):
        tool = Base(execute=ValueError("bad state"))
        tool_runner = runner(tool)
        assert (await tool_runner.run(call("base"))).response.error == "tool_error"
        await tool_runner.close()
        assert tool.log[-1][0] == "release"

    async def test_a_failing_calc_reward_is_an_env_error(self):
        tool_runner = runner(Base(calc_reward=KeyError("x")))
        await tool_runner.open()
        with pytest.raises(EnvError, match="calc_reward"):
            await tool_runner.rewards()
        await tool_runner.close()

    async def test_a_create_that_breaks_its_contract(self):
        class Wrong(Base):
            async def create(self, instance_id=None, **kwargs):
                return "only an id"

        with pytest.raises(EnvError, match=r"must return \(instance_id, ToolResponse\)"):
            await runner(Wrong()).open()

    async def test_zero_and_none_are_no_rewards_and_a_creates_reward_counts(self):
        class Quiet(Base):
            async def create(self, instance_id=None, **kwargs):
                return "id", ToolResponse(reward=float(self.name == "first"))

            async def calc_reward(self, instance_id, **kwargs):
                return {"first": 0.5, "second": 0.0, "third": None}[self.name]

        tool_runner = runner(Quiet("first"), Quiet("second"), Quiet("third"))
        await tool_runner.open()
        assert await tool_runner.rewards() == {"tool/first": 1.5}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(
    ToolCall,
    id=st.text(max_size=3),
    name=st.one_of(st.sampled_from(["add", "upper", "base", "failing", "spread"]), st.text(max_size=5)),
    arguments=st.one_of(
        JSON, st.fixed_dictionaries({"a": st.integers()}), st.fixed_dictionaries({"text": st.text(max_size=4)})
    ),
    raw=st.text(max_size=5),
    error=st.one_of(st.none(), st.none(), st.text(max_size=8)),
)


@function_tool
async def upper(text: str) -> str:
    await asyncio.sleep(0)
    return text.upper()


@function_tool
async def failing() -> str:
    raise ValueError("always")


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(CALLS, max_size=8))
def test_any_calls_get_as_many_answers_in_their_order(calls):
    async def main():
        tool_runner = runner(add, upper, failing, Base())
        outcomes = await tool_runner.run_all(calls)
        await tool_runner.close()
        return outcomes

    outcomes = asyncio.run(main())
    assert [outcome.call for outcome in outcomes] == calls or all(
        outcome.call is tool_runner for outcome, tool_runner in zip(outcomes, calls, strict=True)
    )
    for outcome in outcomes:
        content = outcome.response.content()
        content.encode()
        if outcome.response.error is not None:
            assert json.loads(content)["error"]["type"] == outcome.response.error
        if outcome.call.error is not None:
            assert not outcome.usable
