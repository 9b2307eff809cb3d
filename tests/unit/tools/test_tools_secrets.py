"""Secrets: declared ones never stand in what a model, a trajectory or a traceback shows; nothing else is touched."""

import dataclasses
import json
import traceback
from urllib.parse import quote

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from support.chat.model_dirs import renderer_for
from turnwise import BaseTool, ToolEnv, ToolResponse, function_tool
from turnwise.envs import reset_env, score_env
from turnwise.errors import ConfigError, EnvError, InferenceError, ToolError, ToolSchemaError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools import ToolRunner
from turnwise.tools.secrets import Secrets, with_secrets
from turnwise.tools.selection import load_tool_config
from turnwise.types import ToolCall

KEY = 'sk-Zürich/42+"quoted"\'\\n'
NAME = "TURNWISE_TEST_KEY"


@pytest.fixture(autouse=True)
def variable(monkeypatch):
    monkeypatch.setenv(NAME, KEY)


class Search(BaseTool):
    """A tool that says its key wherever it fails."""

    def __init__(self, config=None, fails=(), kind=RuntimeError):
        schema = {"name": "search", "parameters": {"type": "object", "properties": {}}}
        super().__init__({"api_key": SecretStr(KEY)} if config is None else config, schema)
        self.fails = fails
        self.kind = kind

    def _maybe(self, where):
        if where in self.fails:
            raise self.kind(f"401 for https://api.example/?key={quote(KEY)}: wrong key {KEY!r} ({KEY})")

    async def create(self, instance_id=None, **kwargs):
        self._maybe("create")
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        self._maybe("execute")
        return ToolResponse(f"refused: {KEY}", error="http_401"), None, {}

    async def calc_reward(self, instance_id, **kwargs):
        self._maybe("calc_reward")

    async def release(self, instance_id, **kwargs):
        self._maybe("release")


def assert_clean(text):
    assert "***" in text
    for form in (KEY, repr(KEY)[1:-1], quote(KEY), quote(KEY, safe="")):
        assert form not in text


def traced(error):
    return "".join(traceback.format_exception(error))


async def answer(tool, **keywords):
    runner = ToolRunner({tool.name: tool}, **keywords)
    return (await runner.run(ToolCall("c", tool.name, {}))).response.text


class TestTexts:
    @given(st.text(st.characters(exclude_characters="*"), min_size=1, max_size=20), st.text(max_size=20))
    def test_no_form_of_a_value_is_left(self, value, around):
        redact = Secrets([SecretStr(value)]).redact
        for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1]):
            assert form not in redact(f"{around}{form}{around}")

    def test_secrets_are_found_in_nested_holders(self):
        @dataclasses.dataclass
        class Inner:
            key: SecretStr
            other: int = 3

        class Model(pydantic.BaseModel):
            token: pydantic.SecretBytes

        holder = {
            "a": [Inner(SecretStr("one"))],
            "b": ({"c": Model(token=b"two")},),
            "d": "three",
            "e": {SecretStr("four")},
        }
        assert Secrets([], holder).redact("one two three four") == "*** *** three ***"

    def test_longer_secrets_are_redacted_first_and_empty_never(self):
        assert Secrets([SecretStr("ab"), SecretStr("abcd"), SecretStr("")]).redact("abcd ab x") == "*** *** x"

    def test_names_are_read_from_the_environment_and_never_guessed(self, monkeypatch):
        monkeypatch.setenv("OTHER_SECRET_KEY", "plain")
        assert Secrets([NAME, "NOT_SET_ANYWHERE"]).redact(f"{KEY} plain") == "*** plain"


class TestConfiguration:
    def test_a_variable_is_read_and_hidden(self):
        tool = Search({"api_key": {"secret_env": NAME}, "deep": [{"key": {"secret_env": NAME}}], "url": "u"})
        assert tool.config["api_key"].get_secret_value() == KEY
        assert tool.config["deep"][0]["key"].get_secret_value() == KEY
        assert tool.config["url"] == "u"
        assert KEY not in repr(tool.config)

    def test_unset_variable_raises_config_error(self):
        with pytest.raises(
            ConfigError, match=r"tool 'search': config\.keys\[1\]: secret_env names .* 'NOPE'.* not set"
        ):
            Search({"keys": ["x", {"secret_env": "NOPE"}]})

    def test_a_file_of_tools_names_a_variable_too(self, tmp_path):
        (tmp_path / "base.py").write_text(
            "from turnwise import BaseTool\n"
            "class Kept(BaseTool):\n"
            "    def __init__(self, config, tool_schema):\n"
            "        self.key = config['api_key'].get_secret_value()\n"
            "        if config.get('fails'):\n"
            "            raise ValueError(f'bad key {self.key}')\n"
            "        super().__init__(config, {'name': 'kept', 'parameters': {'type': 'object', 'properties': {}}})\n"
        )
        entry = f"{{class_name: {tmp_path}/base.py:Kept, config: {{api_key: {{secret_env: {NAME}}}, fails: FAILS}}}}"
        file = tmp_path / "tools.yaml"
        file.write_text(f"tools: [{entry.replace('FAILS', 'false')}]")
        [tool] = load_tool_config(file)
        assert (tool.key, tool.config["api_key"]) == (KEY, SecretStr(KEY))
        file.write_text(f"tools: [{entry.replace('FAILS', 'true')}]")
        with pytest.raises(ConfigError, match=r"ValueError: bad key \*\*\*") as raised:
            load_tool_config(file)
        assert KEY not in traced(raised.value)

    def test_config_without_secrets_is_unchanged(self):
        config = {"env": {"secret_env": "A", "more": 1}, "list": [1, None]}
        assert with_secrets(config, "x") == config

    @pytest.mark.parametrize("secrets", ["NAME", [3], [""], SecretStr("x")])
    def test_invalid_declarations_raise_schema_error(self, secrets):
        with pytest.raises(ToolSchemaError, match="tool 'f': secrets must be a list of names"):
            function_tool("f", secrets=secrets)(lambda: "")


class TestErrors:
    @pytest.mark.parametrize("kind", [RuntimeError, ToolError])
    async def test_error_of_a_call_is_redacted(self, kind):
        assert_clean(await answer(Search(fails=["execute"], kind=kind)))

    async def test_a_text_that_the_tool_marks_as_an_error(self):
        assert await answer(Search()) == "refused: ***"

    async def test_a_result_is_the_tools_own(self):
        @function_tool("echo", secrets=[NAME])
        async def echo() -> str:
            return KEY

        assert await answer(echo) == KEY

    @pytest.mark.parametrize("kind", [RuntimeError, ToolError])
    @pytest.mark.parametrize("declared", ["tool", "owner", "kwargs"])
    async def test_error_of_a_function_is_redacted(self, kind, declared):
        def fails() -> str:
            raise kind(f"no {KEY}")

        tool = function_tool("fails", secrets=[NAME] if declared == "tool" else ())(fails)
        options = {
            "owner": {"secrets": [SecretStr(KEY)]},
            "kwargs": {"tools_kwargs": {"x": {"execute_kwargs": {"k": SecretStr(KEY)}}}},
        }
        assert_clean(await answer(tool, **options.get(declared, {})))

    async def test_a_secret_is_gone_before_the_text_is_cut(self):
        @function_tool("fails", secrets=[NAME], max_output=20)
        async def fails() -> str:
            raise ToolError(f"0123456789 {KEY} tail")

        assert KEY[:5] not in await answer(fails)

    async def test_notes_are_redacted_before_they_are_cut(self):
        @function_tool("notes", secrets=[NAME])
        async def notes() -> ToolResponse:
            return ToolResponse("x", metrics={"status": f"key {KEY}", "long": "0123456789" * 49 + KEY + "y" * 5000})

        outcome = await ToolRunner({"notes": notes}).run(ToolCall("c", "notes", {}))
        assert KEY[:5] not in str(outcome.response.notes)
        assert outcome.response.notes["status"].startswith("key ")
        assert len(outcome.response.notes["long"]) < 1100

    @pytest.mark.parametrize("method", ["create", "calc_reward", "release"])
    @pytest.mark.parametrize("kind", [RuntimeError, InferenceError])
    async def test_errors_of_create_reward_and_release_are_redacted(self, method, kind):
        runner = ToolRunner({"search": Search(fails=[method], kind=kind)})

        async def live():
            await runner.open()
            await runner.rewards()
            await runner.close()

        with pytest.raises(InferenceError if kind is InferenceError else EnvError) as raised:
            await live()
        assert_clean(str(raised.value))
        assert KEY not in traced(raised.value)
        assert repr(KEY)[1:-1] not in traced(raised.value)

    async def test_error_of_the_infrastructure_is_redacted(self):
        def fails() -> str:
            raise InferenceError(f"no {KEY}")

        with pytest.raises(InferenceError) as raised:
            await answer(function_tool("fails", secrets=[NAME])(fails))
        assert_clean(str(raised.value))


class Leaky(ToolEnv):
    tools = (Search(fails=["execute", "calc_reward"]),)
    secrets = (SecretStr("db-password"),)

    def reset(self, task=None, *, seed=None):
        return "go", {}

    @function_tool
    def query(self) -> str:
        raise ConnectionError("postgres://user:db-password@host")

    def score(self, final):
        if "twice" in final["content"]:
            raise RuntimeError(f"db-password and {KEY}")
        return 1.0


@pytest.mark.parametrize("final", ["once", "twice"])
async def test_neither_model_nor_trajectory_sees_a_secret(final):
    renderer = renderer_for("qwen3")
    calls = [ToolCall("", "search", {}), ToolCall("", "query", {})]
    lines = [{"role": "assistant", "content": "", "tool_calls": calls}, final]
    client = ScriptedClient(renderer, lines, tools=[Leaky.tools[0].schema, Leaky.tool_methods["query"].schema])
    config = RolloutConfig.model_validate({"env": {"name": f"{__name__}:Leaky"}})
    outcome = await EpisodeRunner(config, client, renderer, context_length=5000).run(EpisodeSpec(Task("t", ""), "g"))
    [trajectory] = outcome.trajectories
    prompts = "".join(request.text for request in client.requests)
    assert "postgres://user:***@host" in prompts
    for text in (prompts, trajectory.error, traced(outcome.error), repr(trajectory)):
        assert "db-password" not in text
        assert KEY not in text
        assert repr(KEY)[1:-1] not in text
    assert_clean(trajectory.error)


async def test_error_of_an_environment_without_an_episode_is_redacted():
    env = Leaky()
    await reset_env(env)
    with pytest.raises(EnvError) as raised:
        await score_env(env, {"role": "assistant", "content": "twice"})
    assert str(raised.value) == "Leaky.score raised RuntimeError: *** and ***"
    assert "db-password" not in traced(raised.value)
