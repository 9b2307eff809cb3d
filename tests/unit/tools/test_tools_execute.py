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
    found = [as_tool(tool) for tool in tools]
    return ToolRunner({tool.name: tool for tool in found}, **keywords)


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
    async def test_a_result(self):
        assert (await answer(add, a=2)).text == "3"

    @pytest.mark.parametrize(
        ("made", "word", "details"),
        [
            (ToolCall("c", "ad", {}), "unknown_tool", {"available": ["add"]}),
            (ToolCall("c", "add", {}, "{", "the arguments are not JSON"), "invalid_json", {"tool": "add"}),
            (ToolCall("c", "add", {}, "", "it stands inside reasoning"), "unusable_call", {"tool": "add"}),
            (ToolCall("c", "", {}, "", "it has no name"), "unusable_call", {"available": ["add"]}),
            (ToolCall("c", "add", {"a": "x"}), "invalid_arguments", {"tool": "add", "path": "$.a"}),
            (ToolCall("c", "add", {}), "invalid_arguments", {"tool": "add", "path": "$"}),
        ],
    )
    async def test_unusable_calls_never_reach_a_tool(self, made, word, details):
        outcome = await runner(add).run(made)
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
        "made",
        [
            ToolCall("c", "n" * 100_000, {}),
            ToolCall("c", "add", {"a": "9" * 100_000}),
            ToolCall("c", "add", {"a": 1, "k" * 100_000: 1}),
            ToolCall("c", "add", {}, "", "the call is not JSON: " + "x" * 100_000),
        ],
    )
    async def test_a_models_own_words_are_quoted_short(self, made):
        outcome = await runner(add).run(made)
        assert not outcome.usable
        assert len(outcome.response.text) < 4500

    async def test_a_path_is_short_too(self):
        def deep(places: dict[str, int]) -> str:
            return ""

        outcome = await runner(deep).run(call("deep", places={"k" * 100_000: "x"}))
        assert error_of(outcome.response)["path"].startswith("$.")
        assert len(outcome.response.text) < 1000

    async def test_a_tool_error_is_its_text(self):
        async def fails() -> str:
            raise ToolError("no such file 'ä'")

        response = await answer(fails)
        assert (response.error, error_of(response)["message"]) == ("tool_error", "no such file 'ä'")
        assert response.metrics == {}

    @pytest.mark.parametrize(
        "kind", [KeyError, StopIteration, SystemExit, TimeoutError, RecursionError, asyncio.CancelledError]
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
    async def test_texts(self, value, text):
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
    async def test_functions_of_one_message_run_together(self):
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

    async def test_stateful_tools_run_one_at_a_time_in_call_order(self):
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
        made = ToolRunner(tools, owner=Owner())
        names = ["slow", "beside", "threaded", "slow", "quick", "threaded", "beside", "slow"]
        calls = [call(name, call_id=str(n), **({} if name == "beside" else {"n": n})) for n, name in enumerate(names)]
        outcomes = await made.run_all(calls)
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

        made = ToolRunner({"slow": Owner.slow}, owner=Owner())
        await asyncio.gather(*(made.run(call("slow", n=n)) for n in range(4)))
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

    async def test_a_tool_may_call_another_one_of_its_episode(self):
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

    async def test_an_error_of_one_waits_for_the_others(self):
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

        made = runner(where, executor=executor)
        texts = {(await made.run(call("where"))).response.text for _ in range(3)}
        assert texts == {str(executor.submit(threading.get_ident).result(WAIT))}
        executor.shutdown()
        with pytest.raises(EnvError, match="rejected the call"):
            await made.run(call("where"))


class TestTimeouts:
    async def test_an_async_tool_is_really_cancelled(self):
        ended = []

        @function_tool(timeout=0.01)
        async def hangs() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(1)
            return ""

        made = runner(hangs)
        outcome = await made.run(call("hangs"))
        assert (outcome.response.error, made.lost, ended) == ("timeout", 0, [1])
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
        monkeypatch.setattr("turnwise.tools.execute.CANCEL_GRACE_S", 0.01)
        release = asyncio.Event()

        @function_tool(timeout=0.01)
        async def stubborn() -> str:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()
            return ""

        made = runner(stubborn)
        assert (await made.run(call("stubborn"))).response.error == "timeout"
        assert made.lost == 1
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

        made = runner(hangs, FunctionTool(after, concurrent=False), executor=executor)
        outcome = await made.run(call("hangs"))
        assert (outcome.response.error, made.lost) == ("timeout", 1)
        # Nothing else of the episode runs beside a thread that nobody can stop.
        later = await made.run_all([call("after"), call("nothing")])
        assert [each.response.error for each in later] == ["timeout", "unknown_tool"]
        assert ran == []
        release.set()
        executor.shutdown()

    @pytest.mark.parametrize("ends", ["time-out", "cancelled"])
    async def test_a_tool_that_holds_a_process_ends_it(self, ends):
        begun = asyncio.Event()
        # Started before the call: how long that takes is the machine's affair, not the tool's.
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)

        @function_tool(timeout=0.2 if ends == "time-out" else WAIT)
        async def shell() -> str:
            begun.set()
            try:
                await process.wait()
            finally:
                process.kill()
                await process.wait()
            return ""

        made = runner(shell)
        task = asyncio.ensure_future(made.run(call("shell")))
        async with asyncio.timeout(WAIT):
            await begun.wait()
            if ends == "cancelled":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                assert (await task).response.error == "timeout"
        # The call was answered after the tool had cleaned up, not while it did.
        assert process.returncode == -signal.SIGKILL
        assert made.lost == 0

    async def test_a_call_that_waited_for_a_thread_is_not_lost(self):
        executor = ToolThreads(1)
        release = threading.Event()
        blocker = executor.submit(release.wait, WAIT)
        made = runner(FunctionTool(lambda: "x", name="f", timeout=0.01), executor=executor)
        assert (await made.run(call("f"))).response.error == "timeout"
        assert made.lost == 0
        release.set()
        blocker.result(WAIT)
        assert (await made.run(call("f"))).response.text == "x"
        executor.shutdown()

    async def test_the_episodes_time_out_serves_tools_without_their_own(self):
        async def hangs() -> str:
            await asyncio.Event().wait()
            return ""

        assert (await runner(hangs, timeout=0.01).run(call("hangs"))).response.error == "timeout"

    async def test_cancelling_the_episode_cancels_the_tool(self):
        begun, ended = asyncio.Event(), []

        @function_tool(timeout=WAIT)
        async def hangs() -> str:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(1)
            return ""

        task = asyncio.ensure_future(runner(hangs).run_all([call("hangs"), call("hangs")]))
        async with asyncio.timeout(WAIT):
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert ended == [1, 1]

    async def test_cancelling_the_episode_gives_its_thread_up(self):
        executor = ToolThreads(1)
        begun, release = threading.Event(), threading.Event()

        def hangs() -> str:
            begun.set()
            release.wait(WAIT)
            return ""

        made = runner(hangs, executor=executor)
        task = asyncio.ensure_future(made.run(call("hangs")))
        await asyncio.to_thread(begun.wait, WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (made.lost, executor.lost) == (1, 1)
        release.set()
        executor.shutdown()


class TestBaseTools:
    async def test_created_once_released_once(self):
        tool = Base()
        made = runner(tool)
        outcomes = await made.run_all([call("base", x=1), call("base"), call("base", x="no")])
        assert [outcome.response.error for outcome in outcomes] == [None, None, "invalid_arguments"]
        assert (outcomes[0].response.reward, outcomes[0].response.metrics) == (0.5, {"n": 1.0})
        assert await made.rewards() == {"tool/base": 0.25}
        await made.close()
        await made.close()
        assert [entry[0] for entry in tool.log] == ["create", "execute", "execute", "calc_reward", "release"]
        with pytest.raises(EnvError, match="after the end"):
            await made.run(call("base"))

    async def test_created_once_by_calls_that_come_together(self):
        tool = Base()
        tool.concurrent = True
        made = runner(tool)
        await asyncio.gather(*(made.run(call("base")) for _ in range(5)))
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
        made = runner(tool, tools_kwargs={"base": kwargs})
        await made.run(call("base"))
        await made.rewards()
        await made.close()
        create, execute, calc_reward, release = (entry[-1] for entry in tool.log)
        assert create == {"from": "create", "create_kwargs": {"from": "create"}}
        assert execute == {"from": "execute", "agent_data": made.data}
        assert (calc_reward, release) == ({"from": "calc_reward"}, {"from": "release"})

    async def test_a_failing_create_releases_the_others_and_is_an_env_error(self):
        log = []
        made = runner(Base("one", log), Base("two", log, create=OSError("no disk")))
        with pytest.raises(EnvError, match=r"Base\.create of tool 'two' raised OSError: no disk"):
            await made.run(call("one"))
        assert [entry[:2] for entry in log] == [("create", "one"), ("create", "two"), ("release", "one")]
        await made.close()
        assert len(log) == 3

    async def test_a_failing_release_does_not_keep_the_others(self):
        log = []
        made = runner(Base("one", log), Base("two", log, release=OSError("stuck")), Base("three", log))
        await made.open()
        with pytest.raises(EnvError, match=r"Base\.release of tool 'two' raised OSError"):
            await made.close()
        await made.close()
        assert sorted(entry[1] for entry in log if entry[0] == "release") == ["one", "three", "two"]

    async def test_a_cancelled_release_does_not_keep_the_others_either(self):
        log, begun = [], asyncio.Event()

        class Slow(Base):
            async def release(self, instance_id, **kwargs):
                begun.set()
                await asyncio.Event().wait()

        # Released in the reverse order of their creation.
        made = runner(Base("one", log), Slow("two", log))
        await made.open()
        task = asyncio.ensure_future(made.close())
        async with asyncio.timeout(WAIT):
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert log[-1][:2] == ("release", "one")

    async def test_a_failing_execute_is_answered_and_still_released(self):
        tool = Base(execute=ValueError("bad state"))
        made = runner(tool)
        assert (await made.run(call("base"))).response.error == "tool_error"
        await made.close()
        assert tool.log[-1][0] == "release"

    async def test_a_failing_calc_reward_is_an_env_error(self):
        made = runner(Base(calc_reward=KeyError("x")))
        await made.open()
        with pytest.raises(EnvError, match="calc_reward"):
            await made.rewards()
        await made.close()

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

        made = runner(Quiet("first"), Quiet("second"), Quiet("third"))
        await made.open()
        assert await made.rewards() == {"tool/first": 1.5}


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
        made = runner(add, upper, failing, Base())
        outcomes = await made.run_all(calls)
        await made.close()
        return outcomes

    outcomes = asyncio.run(main())
    assert [outcome.call for outcome in outcomes] == calls or all(
        outcome.call is made for outcome, made in zip(outcomes, calls, strict=True)
    )
    for outcome in outcomes:
        content = outcome.response.content()
        content.encode()
        if outcome.response.error is not None:
            assert json.loads(content)["error"]["type"] == outcome.response.error
        if outcome.call.error is not None:
            assert not outcome.usable
