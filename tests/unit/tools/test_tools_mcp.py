"""Tools of an MCP server: over stdio and over HTTP, with everything that a server may do to a client."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import mcp_types
import pytest
from pydantic import ValidationError

from support.chat.toy_renderer import ToyRenderer
from support.tools.mcp_program import COMMAND, PICTURE, SCHEMAS, TREE, Tools, serving
from turnwise.config import load_config
from turnwise.errors import ConfigError, EnvError, MissingExtraError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.tools import MCPServerConfig, Toolbox, ToolRunner, ToolsConfig
from turnwise.tools.mcp import MCPServer, MCPTool
from turnwise.types import ToolCall


def toolbox(**config) -> Toolbox:
    return Toolbox(ToolsConfig(mcp=[MCPServerConfig(**config)]))


async def runner_of(box: Toolbox) -> ToolRunner:
    return ToolRunner({tool.name: tool for tool in await box.tools()})


async def answer(runner: ToolRunner, name: str, **arguments):
    return (await runner.run(ToolCall("c", name, arguments))).response


async def test_schemas_stay_whole_and_results_are_mapped() -> None:
    async with serving(Tools().server()) as url, toolbox(url=url, media=["image"]) as box:
        runner = await runner_of(box)
        assert list(runner.tools) == list(SCHEMAS)
        assert runner.tools["tree"].schema.parameters == TREE
        assert runner.tools["tree"].schema.description == "The tool tree."
        assert (await answer(runner, "echo", text="hello")).text == "hello"
        assert (await answer(runner, "tree", points=[{"y": 1}])).error == "invalid_arguments"
        assert "'mode': 7" in (await answer(runner, "tree", points=[{"x": 1}], mode=7)).text
        failed = await answer(runner, "fail", text="no such flight")
        assert failed.error == "tool_error"
        assert "no such flight" in failed.text
        refused = await answer(runner, "refuse")
        assert (refused.error, "that is refused" in refused.text) == ("tool_error", True)
        picture = await answer(runner, "picture")
        assert (picture.text, picture.image) == ("look", [f"data:image/png;base64,{PICTURE}"])
        assert (await answer(runner, "structured")).text == '{"degrees": 21.5}'
        mixed = await answer(runner, "mixed")
        assert mixed.text.splitlines() == [
            "first", "a note", "[file:///data: about 3 bytes of application/zip]", "[more](file:///more)"
        ]  # fmt: skip


@pytest.mark.long
async def test_a_lost_server_is_at_most_one_error_and_the_next_call_reconnects() -> None:
    async with toolbox(command=COMMAND) as box:
        runner = await runner_of(box)
        assert (await answer(runner, "variable", text="TURNWISE_NOT_THERE")).text == "not set"
        # What it writes to its standard error is bounded, and its end is told.
        assert (await answer(runner, "shout")).text == "said"
        log = box._loaded[0]._server._shared._log
        assert os.fstat(log.fileno()).st_size > 3 << 20
        assert (await answer(runner, "count")).text == "1"
        assert os.fstat(log.fileno()).st_size == 0
        words = r"was lost during a call of 'die' .*\(its standard error ends with: dying as asked\)"
        with pytest.raises(EnvError, match=words) as error:
            await answer(runner, "die")
        assert error.value.retryable
        assert (await answer(runner, "count")).text == "1"
        # Between calls it is no error.
        connection = box._loaded[0]._server._shared
        [child] = [int(pid) for pid in _children()]
        os.kill(child, signal.SIGKILL)
        await asyncio.wait_for(connection._gone.wait(), 20)
        assert (await answer(runner, "count")).text == "1"


def _children() -> list[str]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        listed = file.read().split()
    return [pid for pid in listed if b"mcp_program.py" in open(f"/proc/{pid}/cmdline", "rb").read()]


@pytest.mark.long
async def test_an_episode_may_have_a_server_of_its_own() -> None:
    async with toolbox(command=COMMAND, scope="episode", include=["count", "die"]) as box:
        one, two = await runner_of(box), await runner_of(box)
        assert [(await answer(one, "count")).text for _ in range(2)] == ["1", "2"]
        assert (await answer(two, "count")).text == "1"
        with pytest.raises(EnvError, match="was lost during a call of 'die'"):
            await answer(one, "die")
        # What it kept is gone, so this episode cannot continue; the other one can.
        with pytest.raises(EnvError, match="ended in the middle of the episode"):
            await answer(one, "count")
        assert (await answer(two, "count")).text == "2"
        await one.close()
        await two.close()
        assert not _children()


async def test_a_call_that_takes_too_long_is_answered_and_the_connection_goes_on() -> None:
    async with serving(Tools().server()) as url, toolbox(url=url, timeout=0.2) as box:
        runner = await runner_of(box)
        runner.tools["count"].timeout = 20
        assert (await answer(runner, "hang")).error == "timeout"
        assert (await answer(runner, "count")).text == "1"


@pytest.mark.long
async def test_hanging_server_is_replaced() -> None:
    async with toolbox(command=COMMAND, timeout=0.5) as box:
        runner = await runner_of(box)
        runner.tools["count"].timeout = 60
        assert (await answer(runner, "count")).text == "1"
        assert (await answer(runner, "block")).error == "timeout"
        assert (await answer(runner, "count")).text == "1"
    assert not _children()


@pytest.mark.long
async def test_a_server_that_starts_more_slowly_than_calls_may_take_is_connected_to_all_the_same() -> None:
    async with toolbox(command=COMMAND, timeout=0.05) as box:
        runner = await runner_of(box)
        runner.tools["die"].timeout = 60
        with pytest.raises(EnvError, match="was lost during a call of 'die'"):
            await answer(runner, "die")
        async with asyncio.timeout(60):
            while (counted := await answer(runner, "count")).error == "timeout":
                pass
        # A call that is answered too late for this machine has counted too: it is one server that counts on.
        assert int(counted.text) >= 1
    assert not _children()


async def test_over_http_many_calls_at_once() -> None:
    first = Tools()
    async with serving(first.server()) as url, toolbox(url=url, concurrent=True) as box:
        runner = await runner_of(box)
        texts = await asyncio.gather(*(answer(runner, "echo", text=str(n)) for n in range(20)))
        assert [response.text for response in texts] == [str(n) for n in range(20)]
        assert (await answer(runner, "count")).text == "1"
    assert first.counted == 1


@pytest.mark.long
async def test_lost_server_raises_env_error_and_a_restarted_server_answers() -> None:
    async with serving(Tools().server()) as url:
        port = int(url.split(":")[2].split("/")[0])
        box = toolbox(url=url)
        runner = await runner_of(box)
        assert (await answer(runner, "count")).text == "1"
    with pytest.raises(EnvError, match=rf"MCP server 'http://127.0.0.1:{port}/mcp' was lost during a call"):
        await answer(runner, "count")
    with pytest.raises(EnvError, match=rf"MCP server 'http://127.0.0.1:{port}/mcp' cannot be reached: ConnectError"):
        await answer(runner, "count")
    async with serving(Tools().server(), port):
        assert (await answer(runner, "count")).text == "1"
        await box.close()


class TestBadConfigurations:
    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({}, "exactly one of command"),
            ({"command": ["x"], "url": "http://x"}, "exactly one of command"),
            ({"command": []}, "at least 1 item"),
            ({"url": "localhost:8000"}, "begins with http://"),
            ({"url": "http://x", "env": {"A": "b"}}, "env only with command"),
            ({"command": ["x"], "headers": {"A": "b"}}, "headers only with url"),
            ({"command": ["x"], "timeout": 0}, "greater than 0"),
        ],
    )
    def test_invalid_settings_raise_validation_error(self, config, words) -> None:
        with pytest.raises(ValidationError, match=words):
            MCPServerConfig(**config)

    def test_unknown_key_is_named_with_its_line(self, tmp_path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("env:\n  name: tool\n  tools:\n    mcp:\n      - {comand: [x]}\n")
        with pytest.raises(ConfigError, match=r"env\.tools\.mcp\.0\.comand \(run\.yaml:5\): unknown key.*command\?"):
            load_config(RolloutConfig, path)

    async def test_a_program_that_is_not_there(self) -> None:
        with pytest.raises(EnvError, match=r"MCP server 'no-such-program-here' cannot be reached: FileNotFoundError"):
            await toolbox(command=["no-such-program-here"]).tools()

    async def test_a_program_that_speaks_something_else(self) -> None:
        command = [sys.executable, "-c", "import sys; print('usage: me', file=sys.stderr); sys.exit(2)"]
        with pytest.raises(EnvError, match=r"(?s)cannot be reached \(its standard error ends with: usage: me\)"):
            await toolbox(command=command).tools()

    async def test_a_program_that_says_nothing(self, monkeypatch) -> None:
        monkeypatch.setattr("turnwise.tools.mcp.CONNECT_S", 0.5)
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        with pytest.raises(EnvError, match=r"was not connected within 0\.5 s"):
            await toolbox(command=command).tools()

    async def test_include_of_an_unknown_tool_raises_config_error(self) -> None:
        async with serving(Tools().server()) as url, toolbox(url=url, include=["ecko"]) as box:
            with pytest.raises(ConfigError, match=r"include names 'ecko'; did you mean 'echo'\?; its tools are echo"):
                await box.tools()

    def test_external_schema_references_raise_config_error(self) -> None:
        schema = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/a.json"}}}
        with pytest.raises(ConfigError, match=r"refer to 'http://127.0.0.1:9/a.json', .*or leave it out with include"):
            MCPTool(MCPServer(MCPServerConfig(command=["x"])), mcp_types.Tool(name="t", input_schema=schema))

    def test_credentials_are_not_in_the_server_name(self) -> None:
        server = MCPServer(MCPServerConfig(url="https://me:pass@example.org/mcp?token=abc#x"))
        assert server.name == "https://example.org/mcp"

    @pytest.mark.long
    async def test_two_servers_with_the_same_tools_collide_unless_prefixed(self) -> None:
        async with serving(Tools().server()) as url:
            plain, named = (
                MCPServerConfig(url=url, include=["echo"]),
                MCPServerConfig(url=url, prefix="b_", include=["echo"]),
            )
            async with Toolbox(ToolsConfig(mcp=[plain, plain])) as box:
                with pytest.raises(ConfigError, match=r"'echo': the MCP server http://.*, and the MCP server"):
                    await box.tools()
            async with Toolbox(ToolsConfig(mcp=[plain, named])) as box:
                assert [tool.name for tool in await box.tools()] == ["echo", "b_echo"]


@pytest.mark.long
async def test_secrets_reach_the_server_and_no_error(monkeypatch) -> None:
    monkeypatch.setenv("TURNWISE_TEST_KEY", "k-123456")
    env = {"KEY": {"secret_env": "TURNWISE_TEST_KEY"}, "OTHER": "plain"}
    async with toolbox(command=COMMAND, env=env) as box:
        runner = await runner_of(box)
        assert (await answer(runner, "variable", text="KEY")).text == "k-123456"
        assert (await answer(runner, "variable", text="OTHER")).text == "plain"
        reply_text = await answer(runner, "fail", text="the key k-123456 is wrong")
        assert "the key *** is wrong" in reply_text.text
    show = [sys.executable, "-c", "import os, sys; print(os.environ['KEY'], file=sys.stderr); sys.exit(1)"]
    with pytest.raises(EnvError) as error:
        await toolbox(command=show, env=env).tools()
    assert "k-123456" not in str(error.value)
    assert "ends with: ***" in str(error.value)
    with pytest.raises(ConfigError, match=r"env\.KEY: secret_env names the environment variable 'TURNWISE_NOT_SET'"):
        MCPServer(MCPServerConfig(command=COMMAND, env={"KEY": {"secret_env": "TURNWISE_NOT_SET"}}))


@pytest.mark.long
async def test_through_the_runner_a_dying_server_is_a_recorded_failure_and_the_retry_goes_on() -> None:
    renderer = ToyRenderer()
    written: list = []

    def script(request):
        first_attempt = request.session_id.split("/")[1].startswith("0.0")
        if request.number == 0:
            name = "die" if first_attempt else "count"
            return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", name, {})]}
        return "done"

    config = load_config(
        RolloutConfig,
        defaults={
            "env": {
                "name": "tool",
                "config": {"scorer": "turnwise.envs.basic.task_env:only_tools"},
                "tools": {"mcp": [{"command": COMMAND, "include": ["count", "die"]}]},
            }
        },
    )
    parts = RolloutParts(renderer, write=written.append)
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, script), None, parts)
    [group] = await producer.gather([RolloutRequest(Task("t", "go"))])
    await producer.close()
    failed, success = written
    assert failed.error.startswith("EnvError: MCP server")
    assert failed.rewards == []
    assert (success.error, success.attempt) == (None, 1)
    assert group.trajectories == [success]
    assert success.segments[2].messages[0]["content"] == "1"
    assert not _children()


async def test_without_the_package_the_extra_is_named(monkeypatch) -> None:
    for name in ("turnwise.tools.mcp",):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    with pytest.raises(
        MissingExtraError, match=r"the tools of an MCP server needs the package 'mcp': .*turnwise-rl\[mcp\]"
    ):
        await toolbox(command=COMMAND).tools()
