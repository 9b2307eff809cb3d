"""Tools, schemas and tasks that do what they should not: nothing of it reaches others, and authors get errors."""

import asyncio
import importlib
import re
import socket
import sys
from typing import Any

import pytest

from support.chat.model_dirs import renderer_for
from turnwise import BaseTool, Task, ToolEnv, ToolResponse, function_tool
from turnwise.envs import register, reset_env
from turnwise.errors import EnvError, TaskError, ToolSchemaError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tools import FunctionTool, OutputLimit, ToolRunner, as_schema
from turnwise.tools.selection import tools_kwargs
from turnwise.types import ToolCall

OPEN = {"type": "object", "properties": {"items": {"type": "array"}, "by_name": {"type": "object"}}}
OPEN["required"] = list(OPEN["properties"])


def spoil(items: Any, by_name: Any) -> None:
    items.append("spoiled")
    items[0].append("spoiled")
    by_name.clear()


class Spoiler(BaseTool):
    def __init__(self, name="spoil_object"):
        super().__init__({}, {"name": name, "parameters": OPEN})

    async def execute(self, instance_id, parameters, **kwargs):
        spoil(**parameters)
        return ToolResponse("done"), None, {}


@register("tools_hostile")
class World(ToolEnv):
    tools = (Spoiler(),)

    def reset(self, task=None, *, seed=None):
        return "go", {}

    @function_tool(inline=True)
    def spoil_any(self, items: Any, by_name: dict[str, Any]) -> str:
        spoil(items, by_name)
        return "done"

    @function_tool(inline=True, schema={"name": "spoil_given", "parameters": OPEN})
    def spoil_given(self, items, by_name) -> str:
        spoil(items, by_name)
        return "done"

    def score(self, final):
        return 1.0


class TestArgumentsThatAreChanged:
    @pytest.mark.parametrize("name", ["spoil_object", "spoil_any", "spoil_given"])
    async def test_hostile_tools_leave_the_conversation_unchanged(self, name):
        renderer = renderer_for("qwen3")
        call = ToolCall("", name, {"items": [[1], 2], "by_name": {"a": {"b": 1}}})
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        client = ScriptedClient(renderer, [message, "done"], tools=[tool.schema for tool in World().toolset().values()])
        config = RolloutConfig.model_validate({"env": {"name": "tools_hostile"}})
        outcome = await EpisodeRunner(config, client, renderer, context_length=9000).run(
            EpisodeSpec(Task("t", ""), "g")
        )
        [trajectory] = outcome.trajectories
        assert (trajectory.error, trajectory.metrics["tool_errors"], trajectory.metrics["forks"]) == (None, 0, 0)
        assert "spoiled" not in client.requests[1].text

    async def test_task_arguments_are_copied_per_episode(self):
        class Keeps(BaseTool):
            async def create(self, instance_id=None, *, rows=None, **kwargs):
                rows.append("more")
                return await super().create(instance_id)

        tools = {"keeps": Keeps({}, {"name": "keeps", "parameters": {"type": "object", "properties": {}}})}
        task = Task("t", "go", {"tools_kwargs": {"keeps": {"create_kwargs": {"rows": ["one"]}}}})
        for _ in range(2):
            schema = tools_kwargs(tools, task)
            runner = ToolRunner(tools, tools_kwargs=schema)
            await runner.open()
            await runner.close()
            assert schema["keeps"]["create_kwargs"]["rows"] == ["one", "more"]
        assert task.data["tools_kwargs"]["keeps"]["create_kwargs"]["rows"] == ["one"]


class Narrow(BaseTool):
    def __init__(self):
        super().__init__({}, {"name": "narrow", "parameters": {"type": "object", "properties": {}}})

    async def create(self, instance_id=None, wanted=""):
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, limit=3):
        return ToolResponse("yes"), None, {}


class TestArgumentsOfTasksThatNoMethodTakes:
    @pytest.mark.parametrize(
        ("kwargs", "words"),
        [
            ({"execute_kwargs": {"limits": 1}}, r"\['execute_kwargs'\] has 'limits', which .*execute .* takes limit"),
            ({"create_kwargs": {"wnted": 1}}, "has 'wnted', which Narrow.create does not take .*: it takes wanted"),
            ({"create_kwargs": {"instance_id": "a"}}, "has 'instance_id', which Narrow.create"),
            ({"execute_kwargs": {"parameters": {}}}, "has 'parameters', which Narrow.execute"),
        ],
    )  # fmt: skip
    async def test_wrong_tool_kwargs_raise_task_error(self, kwargs, words):
        env = type("Env", (ToolEnv,), {"tools": (Narrow(),), "score": lambda self, final: 1.0})()
        await reset_env(env, Task("t", "go", {"tools_kwargs": {"narrow": kwargs}}))
        with pytest.raises(TaskError, match=words):
            env.toolset()

    def test_accepted_task_arguments_pass(self):
        schema = {"create_kwargs": {"wanted": "x"}, "execute_kwargs": {"limit": 4}}
        assert tools_kwargs({"narrow": Narrow()}, Task("t", "go", {"tools_kwargs": {"narrow": schema}})) == {
            "narrow": schema
        }


class TestReferencesInSchemas:
    def test_dangling_reference_is_refused_at_construction(self):
        for reference in ("#/$defs/point", "other.json", "#point"):
            schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": reference}]}}}
            with pytest.raises(
                ToolSchemaError, match=f"refer to {re.escape(repr(reference))}, which they do not define"
            ):
                as_schema({"name": "x", "parameters": schema.copy()})

    def test_dangling_reference_behind_another_is_refused(self):
        schema = {
            "type": "object",
            "properties": {"a": {"$ref": "#/elsewhere/first"}},
            "elsewhere": {"first": {"items": {"$ref": "#/elsewhere/second"}}},
        }
        with pytest.raises(ToolSchemaError, match="refer to '#/elsewhere/second'"):
            as_schema({"name": "x", "parameters": schema})
        schema["elsewhere"]["second"] = {"type": "integer"}
        assert as_schema({"name": "x", "parameters": schema}).parameters == schema

    def test_property_named_ref_is_no_reference(self):
        schema = {
            "type": "object",
            "properties": {"$ref": {"type": "string", "default": {"$ref": "no"}}, "a": {"$ref": "#/properties/%24ref"}},
        }
        assert as_schema({"name": "x", "parameters": schema}).parameters == schema

    def test_references_are_never_fetched(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0)
            address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
            with pytest.raises(ToolSchemaError, match="which they do not define"):
                as_schema({"name": "x", "parameters": {"type": "object", "properties": {"a": {"$ref": address}}}})
            with pytest.raises(BlockingIOError):
                server.accept()

    async def test_a_schema_of_an_older_draft_is_judged_by_that_draft(self):
        class Pair(BaseTool):
            async def execute(self, instance_id, parameters, **kwargs):
                return ToolResponse("fine"), None, {}

        pair = {"type": "array", "items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False}
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"pair": pair}}
        tool = Pair({}, {"name": "pair", "parameters": schema})
        assert tool.schema.parameters == schema
        runner = ToolRunner({"pair": tool})
        answers = [(await runner.run(ToolCall("c", "pair", {"pair": tool}))).response for tool in ([1, "a"], ["a", 1])]
        assert [answer.error for answer in answers] == [None, "invalid_arguments"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([1], r"\[1\] is not a tool schema"),
        ({"type": "function", "function": None}, "is not a tool schema"),
        ({"name": "x", "description": 5}, "its description is 5"),
        ({"name": "x", "parameters": ["a"]}, r"its parameters are \['a'\]"),
    ],
)
def test_invalid_schemas_raise_schema_errors(source, words):
    with pytest.raises(ToolSchemaError, match=words):
        as_schema(source)


class TestToolsThatEndThings:
    @pytest.mark.parametrize("timeout", [None, 20.0])
    @pytest.mark.parametrize("plain", [True, False])
    async def test_sys_exit_is_answered_and_ends_nobody_elses_episode(self, plain, timeout):
        def leave():
            sys.exit("out of here")

        async def leave_async():
            leave()

        runner = ToolRunner({"leave": FunctionTool(leave if plain else leave_async, timeout=timeout)})
        [first, second] = await runner.run_all([ToolCall(str(number), "leave", {}) for number in range(2)])
        assert (first.response.error, first.response.metrics) == ("tool_error", {"crashes": 1.0})
        assert "SystemExit: out of here" in second.response.text
        await asyncio.sleep(0)

    async def test_error_in_create_is_an_env_error_of_the_tool(self):
        class Leaves(BaseTool):
            async def create(self, instance_id=None, **kwargs):
                sys.exit(2)

        runner = ToolRunner({"x": Leaves({}, {"name": "x", "parameters": {"type": "object", "properties": {}}})})
        with pytest.raises(EnvError, match=r"Leaves.create of tool 'x' raised SystemExit: 2"):
            await runner.open()


class TestAuthorsAreTold:
    @pytest.mark.parametrize("timeout", [None, 20.0])
    async def test_execute_that_is_not_async_raises_env_error(self, timeout):
        class Plain(BaseTool):
            def execute(self, instance_id, parameters, **kwargs):
                return ToolResponse("x"), None, {}

        tool = Plain({}, {"name": "x", "parameters": {"type": "object", "properties": {}}})
        tool.timeout = timeout
        with pytest.raises(EnvError, match=r"Plain.execute of tool 'x' is not async: write async def"):
            await ToolRunner({"x": tool}).run(ToolCall("c", "x", {}))

    def test_generator_functions_raise_schema_error(self):
        def numbers(n: int):
            yield n

        async def later(n: int):
            yield n

        for fn in (numbers, later):
            with pytest.raises(ToolSchemaError, match="yields: a call has one answer, so return it"):
                FunctionTool(fn)

    def test_class_methods_raise_schema_error(self):
        with pytest.raises(ToolSchemaError, match="a class method cannot be a tool: write a method"):

            class Above:
                @classmethod
                @function_tool
                def tool(cls, n: int) -> int:
                    return n

        with pytest.raises(ToolSchemaError, match="a class method cannot be a tool"):

            class Below:
                @function_tool
                @classmethod
                def tool(cls, n: int) -> int:
                    return n

    def test_metrics_that_are_no_dict_raise_env_error(self):
        with pytest.raises(EnvError, match=r"ToolResponse.metrics is \[1\]: it must be a dict"):
            ToolResponse(metrics=[1])

    def test_a_module_whose_function_moved_may_be_loaded_anew(self, tmp_path, monkeypatch):
        file = tmp_path / "hostile_moved.py"
        text = "from turnwise import function_tool\n@function_tool\ndef hostile_moved(a: int): ...\n"
        file.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        module = importlib.import_module("hostile_moved")
        file.write_text(text.replace("@", "\n\n@"))
        assert importlib.reload(module).hostile_moved.fn.__code__.co_firstlineno == 4


def test_a_text_that_cannot_have_too_many_tokens_is_not_counted():
    def count(text: str) -> int:
        raise AssertionError(f"counted {len(text)} characters")

    limit = OutputLimit(100, "tokens")
    assert limit.cut("a" * 99, count) == "a" * 99
    for counted in ("a" * 100, "ä" * 60):
        with pytest.raises(AssertionError, match="counted"):
            limit.cut(counted, count)
