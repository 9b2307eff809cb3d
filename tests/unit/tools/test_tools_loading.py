"""Tools that a configuration names: from a Python file, from YAML, and what a task says about them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.config import load_config
from turnwise.envs import EnvSpec, ToolEnv, close_env, reset_env, schemas, step_env
from turnwise.errors import ConfigError, TaskError, ToolSchemaError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import RolloutParts
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.tools import (
    BaseTool,
    Injected,
    OpenAIFunctionToolSchema,
    Toolbox,
    ToolResponse,
    ToolRunner,
    ToolsConfig,
    as_schema,
    function_tool,
    load_function_tools,
    load_tool_config,
)
from turnwise.types import ToolCall

FUNCTIONS = '''
from turnwise import function_tool
import json

RUNS = []
RUNS.append(1)

@function_tool
def {one}(text: str) -> str:
    """Shout."""
    return text.upper()

@function_tool("{two}")
async def quietly(text: str) -> str:
    return text.lower()

def no_tool(text: str) -> str:
    return text
'''

BASE = """
from turnwise import BaseTool, ToolResponse

class Kept(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(self.config.get("word", "nothing")), None, {}

class Known(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)

    def get_openai_tool_schema(self):
        return {"name": "known", "parameters": {"type": "object", "properties": {}}}

class Strict(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.limit = config["limit"]

class Other:
    pass
"""

SCHEMA = """
    tool_schema:
      type: function
      function:
        name: {name}
        description: Keep things.
        parameters:
          type: object
          properties:
            items: {{type: array, items: {{type: integer, minimum: 0}}, default: []}}
          required: []
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def functions(folder: Path, one: str, two: str) -> Path:
    return written(folder / f"{one}.py", FUNCTIONS.format(one=one, two=two))


def yaml_of(folder: Path, *entries: str, name: str = "tools.yaml") -> Path:
    written(folder / "base.py", BASE)
    return written(folder / name, "tools:\n" + "".join(entries))


async def loaded(**config) -> list:
    async with Toolbox(ToolsConfig(**config)) as toolbox:
        return list(await toolbox.tools())


class TestFunctionFiles:
    def test_the_decorated_functions_are_the_tools_in_their_order(self, tmp_path) -> None:
        tools = load_function_tools(functions(tmp_path, "load_shout", "load_whisper"))
        assert [tool.name for tool in tools] == ["load_shout", "load_whisper"]
        assert tools[0].schema.description == "Shout."

    def test_a_file_is_run_once(self, tmp_path) -> None:
        path = functions(tmp_path, "load_once", "load_once_too")
        first, second = load_function_tools(path), load_function_tools(tmp_path / "." / path.name)
        assert [id(tool) for tool in first] == [id(tool) for tool in second]
        assert sys.modules[first[0].fn.__module__].RUNS == [1]

    def test_tools_that_something_else_imported_before_are_not_missing(self, tmp_path, monkeypatch) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        package = tmp_path / "load_pkg"
        package.mkdir()
        written(package / "__init__.py", "")
        functions(package, "load_early", "load_early_too")
        functions(package, "load_single", "load_single_other")
        __import__("load_pkg.load_early")
        __import__("load_pkg.load_single")
        path = written(
            tmp_path / "all.py",
            "import load_pkg.load_early\nfrom load_pkg.load_single import load_single\n"
            "from turnwise import function_tool\n@function_tool\ndef load_own(n: int) -> int:\n    return n\n",
        )
        names = {tool.name for tool in load_function_tools(path)}
        assert names == {"load_early", "load_early_too", "load_single", "load_own"}

    def test_a_file_that_was_imported_as_a_module_is_not_run_again(self, tmp_path, monkeypatch) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        path = functions(tmp_path, "load_module", "load_module_too")
        module = __import__("load_module")
        assert load_function_tools(path) == [module.load_module, module.quietly]
        assert module.RUNS == [1]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("x = 1\ndef broken(:\n", r"bad\.py:2 failed: SyntaxError: invalid syntax"),
            ("import os\n\nos.no_such_thing\n", r"bad\.py:3 failed: AttributeError"),
            ("import no_such_module_at_all\n", r"bad\.py:1 failed: ModuleNotFoundError: No module named"),
            (
                "from turnwise import function_tool\n@function_tool\ndef f(a):\n    return a\n",
                r"bad\.py:2 failed: ToolSchemaError: tool 'f': parameter 'a' has no type hint",
            ),
            ("def f(a: int) -> int:\n    return a\n", r"bad\.py has no tools: write @function_tool"),
        ],
    )
    def test_broken_tool_files_are_reported_with_their_line(self, tmp_path, text: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            load_function_tools(written(tmp_path / "bad.py", text))

    def test_a_missing_file(self, tmp_path) -> None:
        with pytest.raises(ConfigError, match=r"function_tool_path: no such file: .*none\.py"):
            load_function_tools(tmp_path / "none.py")


class TestYaml:
    def test_class_config_and_schema(self, tmp_path) -> None:
        entry = "  - class_name: base.py:Kept\n    config: {type: native, word: hello}" + SCHEMA.format(name="keep")
        [tool] = load_tool_config(yaml_of(tmp_path, entry))
        assert tool.name == "keep"
        assert tool.config == {"type": "native", "word": "hello"}
        assert tool.schema.parameters["properties"]["items"] == {
            "type": "array", "items": {"type": "integer", "minimum": 0}, "default": []
        }  # fmt: skip
        assert tool.tool_schema.function.name == "keep"
        assert tool.tool_schema.model_dump() == tool.schema.to_json()

    def test_a_module_on_the_path_may_be_named_with_dots(self, tmp_path, monkeypatch) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        written(tmp_path / "load_dotted.py", BASE)
        [tool] = load_tool_config(yaml_of(tmp_path, "  - class_name: load_dotted.Known\n    tool_schema: null\n"))
        assert tool.name == "known"

    def test_every_file_has_tools_of_its_own(self, tmp_path) -> None:
        path = yaml_of(tmp_path, "  - class_name: base.py:Known\n")
        assert load_tool_config(path)[0] is not load_tool_config(path)[0]

    @pytest.mark.parametrize(
        ("entry", "words"),
        [
            ("  - class_nam: base.py:Kept\n", r"tools\.0\.class_nam .*unknown key.*did you mean tools\.0\.class_name"),
            (
                "  - class_name: base.py:Kep\n",
                r"tools\.yaml:2: tools\.0\.class_name .*has no 'Kep'; did you mean 'Kept'",
            ),
            ("  - class_name: nowhere.at.All\n", r"tools\.yaml:2: .*no module named 'nowhere'"),
            ("  - class_name: base.py:Other\n", r"tools\.yaml:2: .*must be a subclass of turnwise\.BaseTool"),
            ("  - class_name: base.py:Kept\n", r"tools\.yaml:2: tools\.0: Kept has no schema"),
            (
                "  - class_name: base.py:Strict" + SCHEMA.format(name="s"),
                r"tools\.yaml:2: tools\.0: .*Strict cannot be made .*KeyError: 'limit'",
            ),
            (
                "  - class_name: base.py:Known\n    config: {type: mcp}\n",
                r"config\.type is 'mcp': only 'native'.*tools\.mcp",
            ),
            ("  - class_name: [\n", r"tools\.yaml:3:1: not YAML"),
        ],
    )
    def test_wrong_tool_entries_are_reported_with_their_line(self, tmp_path, entry: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            load_tool_config(yaml_of(tmp_path, entry))

    def test_error_names_the_line_of_the_wrong_entry(self, tmp_path) -> None:
        valid = "  - class_name: base.py:Kept" + SCHEMA.format(name="k")
        with pytest.raises(ConfigError, match=r"tools\.yaml:14: tools\.1\.class_name"):
            load_tool_config(yaml_of(tmp_path, valid, "\n  - class_name: base.py:Missing\n"))


class TestTogether:
    async def test_both_paths_at_once(self, tmp_path) -> None:
        path = functions(tmp_path, "load_both", "load_both_too")
        tools = await loaded(
            function_tool_path=path, tool_config_path=yaml_of(tmp_path, "  - class_name: base.py:Known\n")
        )
        assert [tool.name for tool in tools] == ["load_both", "load_both_too", "known"]

    async def test_all_collisions_are_named_at_once_with_both_places(self, tmp_path) -> None:
        path = functions(tmp_path, "load_a", "load_b")
        entries = ["\n  - class_name: base.py:Kept" + SCHEMA.format(name=name) for name in ("load_b", "load_a")]
        with pytest.raises(ConfigError) as error:
            await loaded(function_tool_path=path, tool_config_path=yaml_of(tmp_path, *entries))
        text = str(error.value)
        for name, location in (("load_a", "load_a.py:8"), ("load_b", "load_a.py:13")):
            line = next(line for line in text.splitlines() if line.startswith(f"  '{name}'"))
            assert location in line
            assert "Kept of" in line
            assert "tools.yaml" in line

    async def test_a_run_does_not_begin_with_tools_that_cannot_be_loaded(self, tmp_path) -> None:
        path = written(tmp_path / "bad.py", "def f(:\n")
        config = load_config(
            RolloutConfig, defaults={"env": {"name": "lookup", "tools": {"function_tool_path": str(path)}}}
        )
        renderer = ToyRenderer()
        client = ScriptedClient(renderer, ["never asked"])
        with pytest.raises(ConfigError, match=r"bad\.py:1 failed: SyntaxError"):
            await RolloutProducer.create(config, client, None, RolloutParts(renderer))
        assert client.requests == []

    async def test_the_environments_own_tools_collide_too(self, tmp_path) -> None:
        class Loud(ToolEnv):
            @function_tool
            def load_mine(self, text: str) -> str:
                return text

        tools = await loaded(function_tool_path=functions(tmp_path, "load_mine", "load_mine_too"))
        with pytest.raises(
            ConfigError, match=r"'load_mine': .*Loud.*load_mine \(.*test_tools_loading\.py:\d+\).* and "
        ):
            Loud().add_tools(tools)

    async def test_function_listed_and_loaded_is_a_single_tool(self, tmp_path) -> None:
        tools = await loaded(function_tool_path=functions(tmp_path, "load_same", "load_same_too"))
        env = ToolEnv()
        env.tools = [tools[0]]
        env.add_tools(tools)
        assert list(env.toolset()) == ["load_same", "load_same_too"]

    async def test_environment_without_tool_calls_refuses_loaded_tools(self, tmp_path) -> None:
        spec = EnvSpec(
            "single_turn",
            {"scorer": "turnwise.envs.basic.task_env:only_tools"},
            {"function_tool_path": str(functions(tmp_path, "load_none", "load_none_too"))},
        )
        async with spec.toolbox() as toolbox:
            with pytest.raises(ConfigError, match=r"SingleTurnEnv answers no tool calls.*'load_none'"):
                spec.make(await toolbox.tools())

    @pytest.mark.ext
    async def test_tools_of_a_spec_reach_the_checker(self, tmp_path) -> None:
        from turnwise.ext.checks.environment import check_env

        path = functions(tmp_path, "load_doctor", "load_doctor_too")
        spec = EnvSpec("lookup", {}, {"function_tool_path": str(path)})
        assert EnvSpec(**spec.to_record()) == spec
        report = await check_env(spec, seeds=(0,))
        # The second tool has no docstring.
        assert any("load_doctor_too" in finding.message for finding in report.findings)


def env_with(*tools) -> ToolEnv:
    env = ToolEnv()
    env.tools = tools
    return env


@function_tool("sel_find")
def sel_find(query: str, table: Injected[str], limit: Injected[int] = 3) -> str:
    """Find."""
    return f"{query} in {table}, at most {limit}"


@function_tool("sel_count")
def sel_count(items: list[str]) -> int:
    """Count."""
    return len(items)


class Purse(BaseTool):
    def __init__(self) -> None:
        super().__init__({}, {"name": "purse", "parameters": {"type": "object", "properties": {}}})
        self.log: list = []

    async def create(self, instance_id=None, gold: int = 0, **kwargs):
        self.log.append(("create", gold, kwargs))
        return "id", ToolResponse()

    async def execute(self, instance_id, parameters, *, agent_data, price: int = 1):
        agent_data.extra_fields["spent"] = agent_data.extra_fields.get("spent", 0) + price
        self.log.append(("execute", price, agent_data.request_id, [m["role"] for m in agent_data.messages]))
        return ToolResponse(str(agent_data.extra_fields["spent"])), None, {}

    async def calc_reward(self, instance_id, worth: float = 0.5):
        return worth

    async def release(self, instance_id, note: str = ""):
        self.log.append(("release", note))


async def begun(task: Task, *tools) -> ToolEnv:
    env = env_with(*tools)
    await reset_env(env, task)
    return env


def says(name: str, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", name, arguments)]}


FULL = {"sel_find": {"execute_kwargs": {"table": "people"}}}


class TestSelection:
    async def test_only_the_selected_tools_are_offered(self) -> None:
        env = await begun(Task("t", "hi", {"tool_selection": ["sel_count"], "tools_kwargs": FULL}), sel_find, sel_count)
        assert [schema.name for schema in schemas(env)] == ["sel_count"]
        result = await step_env(env, says("sel_find", query="x"))
        assert '"unknown_tool"' in result.observation[0]["content"]
        assert '"available": ["sel_count"]' in result.observation[0]["content"]

    async def test_selection_in_extra_info_is_read(self) -> None:
        info = {"tool_selection": ["sel_find"], "tools_kwargs": FULL | {"sel_count": None}}
        env = await begun(Task("t", "hi", {"extra_info": info}), sel_find, sel_count)
        result = await step_env(env, says("sel_find", query="ana"))
        assert result.observation[0]["content"] == "ana in people, at most 3"
        assert list(env.toolset()) == ["sel_find"]

    async def test_the_next_task_selects_anew_and_an_empty_list_offers_none(self) -> None:
        env = await begun(Task("t", "hi", {"tool_selection": []}), sel_count)
        assert schemas(env) == []
        await reset_env(env, Task("u", "hi"))
        assert [schema.name for schema in schemas(env)] == ["sel_count"]

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ({"tool_selection": ["sel_cout"]}, r"names 'sel_cout'; did you mean 'sel_count'\?, but the tools are"),
            ({"tool_selection": "sel_count"}, r"tool_selection'\] is 'sel_count': it must be a list"),
            (
                {"tool_selection": [], "extra_info": {"tool_selection": []}},
                r"sets data\['tool_selection'\] and data\['extra_info'\]\['tool_selection'\]: keep one",
            ),
            ({"tools_kwargs": []}, r"tools_kwargs'\] is \[\]"),
            ({"tools_kwargs": {"nobody": {}}}, "names 'nobody'"),
            ({"tools_kwargs": {"purse": {"creat_kwargs": {}}}}, "has 'creat_kwargs'; did you mean 'create_kwargs'"),
            ({"tools_kwargs": {"purse": {"create_kwargs": 3}}}, r"\['create_kwargs'\] is 3"),
            (
                {"tools_kwargs": {"sel_count": {"create_kwargs": {}}}},
                "has 'create_kwargs'.*: allowed are execute_kwargs$",
            ),
            (
                {"tools_kwargs": {"sel_count": {"execute_kwargs": {"a": 1}}}},
                "has 'a': the Injected parameters of sel_count",
            ),
        ],
    )
    async def test_wrong_selections_fail_before_the_first_request(self, data, words) -> None:
        env = await begun(Task("row-7", "hi", data), sel_count, Purse())
        with pytest.raises(TaskError, match=words) as error:
            schemas(env)
        assert "row-7" in str(error.value)


class TestInjected:
    def test_injected_parameters_are_hidden_from_the_model(self) -> None:
        assert sel_find.schema.parameters["properties"] == {"query": {"type": "string"}}
        assert sel_find.injected == {"table": True, "limit": False}

    async def test_model_cannot_set_injected_parameters(self) -> None:
        tool_runner = ToolRunner({"sel_find": sel_find}, tools_kwargs=FULL)
        outcome = await tool_runner.run(ToolCall("c", "sel_find", {"query": "a", "table": "secrets"}))
        assert outcome.response.error == "invalid_arguments"

    async def test_missing_injected_argument_raises_task_error(self) -> None:
        env = await begun(Task("row-1", "hi"), sel_find)
        with pytest.raises(TaskError, match=r"task 'row-1': the tool 'sel_find' needs 'table'"):
            schemas(env)

    async def test_methods_and_explicit_schemas_take_injected_parameters(self) -> None:
        class Env(ToolEnv):
            @function_tool(schema={"name": "sel_look", "parameters": {"type": "object", "properties": {}}})
            def look(self, where: Injected[str]) -> str:
                return f"{self.here}: {where}"

        env = Env()
        env.here = "here"
        await reset_env(env, Task("t", "hi", {"tools_kwargs": {"sel_look": {"execute_kwargs": {"where": "door"}}}}))
        result = await step_env(env, says("sel_look"))
        assert result.observation[0]["content"] == "here: door"


class TestBaseToolArguments:
    async def test_every_method_gets_its_own(self) -> None:
        purse = Purse()
        kwargs = {
            "create_kwargs": {"gold": 7}, "execute_kwargs": {"price": 2}, "calc_reward_kwargs": {"worth": 0.75},
            "release_kwargs": {"note": "bye"},
        }  # fmt: skip
        env = await begun(Task("t", "hi", {"tools_kwargs": {"purse": kwargs}}), purse)
        await step_env(env, says("purse"))
        result = await step_env(env, says("purse"))
        assert result.observation[0]["content"] == "4"
        final = await step_env(env, {"role": "assistant", "content": "done"})
        assert final.info["rewards"] == {"score": 0.0, "tool/purse": 0.75}
        await close_env(env)
        assert purse.log[0] == ("create", 7, {"create_kwargs": {"gold": 7}})
        assert purse.log[1][:2] == ("execute", 2)
        assert purse.log[1][3] == ["user", "assistant"]
        assert purse.log[2][3] == ["user", "assistant", "tool", "assistant"]
        assert purse.log[1][2] == purse.log[2][2]
        assert purse.log[3:] == [("release", "bye")]

    async def test_episodes_share_nothing(self) -> None:
        purse = Purse()
        one, two = await begun(Task("a", "hi"), purse), await begun(Task("b", "hi"), purse)
        for env in (one, two, one):
            result = await step_env(env, says("purse"))
        assert result.observation[0]["content"] == "2"
        assert len({entry[2] for entry in purse.log if entry[0] == "execute"}) == 2

    async def test_create_kwargs_parameter_receives_all_arguments(self) -> None:
        class Old(Purse):
            async def create(self, instance_id=None, create_kwargs=None):
                self.log.append(create_kwargs)
                return "id", ToolResponse()

        tool = Old()
        tool_runner = ToolRunner({"purse": tool}, tools_kwargs={"purse": {"create_kwargs": {"gold": 1}}})
        await tool_runner.open()
        assert tool.log == [{"gold": 1}]


class TestSchemas:
    def test_a_class_may_know_its_own_schema(self) -> None:
        class Knows(BaseTool):
            def get_openai_tool_schema(self):
                return OpenAIFunctionToolSchema.model_validate(
                    {"type": "function", "function": {"name": "knows", "description": "d", "parameters": None}}
                )

        tool = Knows({}, None)
        assert tool.name == "knows"
        assert tool.get_openai_tool_schema().function.name == "knows"

    def test_without_any_schema(self) -> None:
        class Nothing(BaseTool):
            pass

        with pytest.raises(ToolSchemaError, match=r"Nothing has no schema: call super.*get_openai_tool_schema"):
            Nothing({}, None)

    def test_attributes_read_and_write_the_dict(self) -> None:
        schema = OpenAIFunctionToolSchema(type="function", function={"name": "a", "parameters": {"type": "object"}})
        schema.function.parameters.properties = {"n": {"type": "integer"}}
        assert schema.function.parameters.required is None
        assert schema.model_dump()["function"]["parameters"]["properties"] == {"n": {"type": "integer"}}
        assert as_schema(schema).parameters["properties"]["n"] == {"type": "integer"}
        with pytest.raises(AttributeError, match=r"OpenAIFunctionSchema has no 'nme': it has name, parameters"):
            _ = schema.function.nme
