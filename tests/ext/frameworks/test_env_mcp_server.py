"""Environments served over MCP, and the environment that is made of loaded tools."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from urllib.parse import urlsplit

import aiohttp
import mcp_types
import psutil
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client

from support.pictures import URI
from turnwise.envs import Env, StepResult, ToolEnv, make, reset_env, step_env
from turnwise.envs.basic.lookup import LookupEnv, table
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.errors import ConfigError, EnvError, InferenceError, TaskError
from turnwise.ext.frameworks.mcp_server import EnvServer, ServedEpisode
from turnwise.tasks import Task
from turnwise.tools import MCPServerConfig, Toolbox, ToolResponse, ToolRunner, ToolsConfig, function_tool
from turnwise.types import ToolCall


def texts(result: mcp_types.CallToolResult) -> list[str]:
    return [block.text for block in result.content]


async def play(client: Client, seed: int, *, of_a_task: bool = False) -> mcp_types.CallToolResult:
    """Play lookup right; a task names the person."""
    [text] = texts(await client.call_tool("task", {}))
    person = text.removeprefix("Who manages ").removesuffix("?")
    answers = table(seed, person=person if of_a_task else None)
    assert answers.person == person
    assert texts(await client.call_tool("team_of", {"person": answers.person})) == [answers.teams[answers.person]]
    team = await client.call_tool("manager_of", {"team": answers.teams[answers.person]})
    return await client.call_tool("finish", {"answer": texts(team)[0]})


class TestOneClient:
    """In one process: the server's own object is what the client speaks to."""

    async def test_an_episode_from_the_task_to_the_score(self, tmp_path) -> None:
        out = tmp_path / "played.jsonl"
        served = EnvServer(LookupEnv, "lookup", seed=5, out=out)
        async with Client(served.server()) as client:
            listed = (await client.list_tools()).tools
            assert [tool.name for tool in listed] == ["team_of", "manager_of", "task", "finish"]
            assert listed[0].input_schema == LookupEnv.team_of.schema.parameters
            [resource] = (await client.list_resources()).resources
            [content] = (await client.read_resource(resource.uri)).contents
            assert content.text == f"Who manages {table(5).person}?"
            prompt = await client.get_prompt("task")
            assert [(message.role, message.content.text) for message in prompt.messages] == [("user", content.text)]
            result = await play(client, 5)
            assert result.structured_content == {"over": "terminated", "reward": 1.0, "rewards": {"score": 1.0}}
            assert texts(result)[-1].startswith("The episode is over.")
            late = await client.call_tool("team_of", {"person": "ana"})
            assert late.is_error
            assert "open another session" in texts(late)[0]
        await served.close()
        [line] = out.read_text().splitlines()
        assert json.loads(line) == {
            "task_id": None, "seed": 5, "over": "terminated", "reward": 1.0, "rewards": {"score": 1.0}, "calls": 3,
            "error": None,
        }  # fmt: skip

    async def test_errors_of_tools_are_errors_of_results(self) -> None:
        async with Client(EnvServer(LookupEnv, "lookup", seed=1).server()) as client:
            result = await client.call_tool("team_of", {"person": "nobody"})
            assert (result.is_error, "there is no person" in texts(result)[0]) == (True, True)
            assert (await client.call_tool("nothing", {})).is_error
            assert (await client.call_tool("finish", {"answer": 3})).is_error
            with pytest.raises(MCPError, match="there is no prompt 'other'; known: 'task'"):
                await client.get_prompt("other")
            with pytest.raises(MCPError, match="there is no resource"):
                await client.read_resource("turnwise://other")

    async def test_limits_of_the_environment_end_and_score_the_episode(self) -> None:
        async with Client(EnvServer(LookupEnv, "lookup", seed=1).server()) as client:
            for _ in range(3):
                result = await client.call_tool("nothing", {})
            assert result.structured_content == {"over": "truncated", "reward": 0.0, "rewards": {"score": 0.0}}

    async def test_an_environment_that_answers_texts_is_spoken_to_by_reply(self) -> None:
        class Echo(Env):
            def reset(self, task=None, *, seed=None):
                return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say."}], {}

            def step(self, action):
                finished = action["content"] == "stop"
                return StepResult("" if finished else f"you said {action['content']}", 0.5, finished, False, {})

        async with Client(EnvServer(Echo, "echo").server()) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["task", "reply"]
            assert texts(await client.call_tool("task", {})) == ["[system]\nBe brief.\n\n[user]\nSay."]
            assert texts(await client.call_tool("reply", {"text": "hi"})) == ["you said hi"]
            result = await client.call_tool("reply", {"text": "stop"})
            assert result.structured_content == {"over": "terminated", "reward": 1.0, "rewards": {"step": 1.0}}

    async def test_images_of_tools_reach_the_client(self) -> None:
        class Camera(ToolEnv):
            @function_tool(media=["image"])
            def shoot(self) -> ToolResponse:
                return ToolResponse("click", image=[URI])

        async with Client(EnvServer(Camera, "camera", tasks=[Task("t", "go")]).server()) as client:
            image, text = (await client.call_tool("shoot", {})).content
            assert (image.mime_type, image.data, text.text) == ("image/png", URI.partition(",")[2], "click")

    async def test_an_environment_that_fails_ends_unscored(self, tmp_path) -> None:
        class Broken(ToolEnv):
            def score(self, final):
                raise OSError("the disk is gone")

        served = EnvServer(Broken, "broken", tasks=[Task("t", "go")], out=tmp_path / "out.jsonl")
        async with Client(served.server()) as client:
            with pytest.raises(
                MCPError, match=r"the episode ended with an error: EnvError: .*Broken.score raised OSError"
            ):
                await client.call_tool("finish", {"answer": "x"})
        await served.close()
        record = json.loads((tmp_path / "out.jsonl").read_text())
        assert (record["over"], record["reward"]) == ("error", None)
        assert "the disk is gone" in record["error"]

    async def test_a_tool_of_the_environments_own_by_such_a_name_is_refused(self) -> None:
        class Taken(ToolEnv):
            @function_tool
            def finish(self) -> str:
                return "mine"

        with pytest.raises(ConfigError, match="Taken has a tool called 'finish'"):
            await ServedEpisode(Taken(), Task("t", "go"), 0).begin()

    async def test_single_turn(self) -> None:
        def right(text: str) -> float:
            return float(text == "4")

        served = EnvServer(lambda: SingleTurnEnv(right), "sum", tasks=[Task("t", "2 + 2?")])
        async with Client(served.server()) as client:
            result = await client.call_tool("finish", {"answer": "4"})
            assert result.structured_content["reward"] == 1.0

    async def test_an_environment_that_cannot_be_reset_is_closed(self) -> None:
        closed = []

        class Broken(ToolEnv):
            def reset(self, task=None, *, seed=None):
                raise OSError("the disk is gone")

            def close(self):
                closed.append(self)
                return super().close()

        async with Client(EnvServer(Broken, "broken").server()) as client:
            with pytest.raises(MCPError, match=r"EnvError: .*Broken.reset raised OSError: the disk is gone"):
                await client.list_tools()
        assert len(closed) == 1

    async def test_tasks_are_read_as_sessions_come(self) -> None:
        def endless():
            for number in itertools.count():
                if number == 2:
                    raise TaskError("line 3 is malformed")
                yield Task(f"t{number}", f"question {number}")

        class Asks(ToolEnv):
            def score(self, final):
                return 1.0

        server = EnvServer(Asks, "asks", tasks=endless())
        for number in range(2):
            async with Client(server.server()) as client:
                assert texts(await client.call_tool("task", {})) == [f"question {number}"]
            await server.end("")
        async with Client(server.server()) as client:
            with pytest.raises(MCPError, match="TaskError: line 3 is malformed"):
                await client.list_tools()


class TestProcesses:
    """Through the command line, as a client would start it."""

    @pytest.mark.long
    async def test_over_stdio_with_a_task_and_tools_of_a_file(self, tmp_path) -> None:
        functions = tmp_path / "more.py"
        functions.write_text(
            "from turnwise import function_tool\n@function_tool\ndef served_twice(n: int) -> int:\n"
            "    print('this goes to stderr')\n    return 2 * n\n"
        )
        arguments = ["-m", "turnwise", "mcp", "lookup", "--tasks", "turnwise.envs.basic.lookup:tasks?n=3&split=test"]
        arguments += ["--task", "lookup-test-0-1", "--function-tool-path", str(functions)]
        with (tmp_path / "log").open("w") as log:
            parameters = StdioServerParameters(command=sys.executable, args=arguments)
            async with Client(stdio_client(parameters, errlog=log)) as client:
                assert texts(await client.call_tool("served_twice", {"n": 4})) == ["8"]
                [text] = texts(await client.call_tool("task", {}))
                assert text.startswith("Who manages ")

    @pytest.mark.long
    async def test_prints_of_an_environment_do_not_mix_with_messages(self, tmp_path) -> None:
        (tmp_path / "prints.py").write_text(
            "import itertools\nfrom turnwise import ToolEnv\nprint('imported', flush=True)\n"
            "class Prints(ToolEnv):\n"
            "    def __init__(self):\n        print('made', flush=True)\n"
            "    def score(self, final):\n        print('scored')\n        return 1.0\n"
            "    def close(self):\n        print('closed')\n        return super().close()\n"
            "def tasks():\n    yield from ({'prompt': f'number {n}'} for n in itertools.count())\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "turnwise", "mcp", f"{tmp_path}/prints.py:Prints", "--tasks",
            f"{tmp_path}/prints.py:tasks", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        parameters = {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        }
        finish = {"name": "finish", "arguments": {"answer": "x"}}
        lines = [
            {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": parameters},
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": finish},
        ]
        try:
            process.stdin.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            answers = [json.loads(await process.stdout.readline()) for _ in range(2)]
            out, err = await process.communicate(b"")  # and hang up
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert [answer["id"] for answer in answers] == [1, 2]
        assert answers[1]["result"]["structuredContent"]["reward"] == 1.0
        assert out == b""
        assert all(word in err.decode() for word in ("imported", "made", "scored", "closed"))

    @pytest.mark.long
    async def test_over_http_each_session_is_an_episode(self, tmp_path) -> None:
        out = tmp_path / "out.jsonl"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "turnwise", "mcp", "lookup", "--http", "--port", "0", "--seed", "7",
            "--out", str(out),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            line = (await process.stdout.readline()).decode()
            url = line.split()[-1]
            assert line.startswith("serving lookup at http://127.0.0.1:")
            # A client that would rather have no session falls back to one that has.
            async with Client(url) as one, Client(url, mode="legacy") as two:
                assert one.protocol_version == two.protocol_version
                await two.call_tool("team_of", {"person": "ana"})
                assert (await play(one, 7, of_a_task=True)).structured_content["reward"] == 1.0
            async with Toolbox(ToolsConfig(mcp=[MCPServerConfig(url=url, scope="episode")])) as box:
                runner = ToolRunner({tool.name: tool for tool in await box.tools()})
                outcome = await runner.run(ToolCall("c", "task", {}))
                assert outcome.response.text.startswith("Who manages ")
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == -signal.SIGTERM
                await runner.close()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert sorted((row["over"], row["reward"], row["calls"]) for row in rows if row["reward"] is not None) == [
            ("terminated", 1.0, 3)
        ]
        assert sorted(row["calls"] for row in rows if row["over"] == "abandoned") == [0, 1]

    @pytest.mark.long
    async def test_bad_command_lines(self, tmp_path) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "turnwise", "mcp", "lookup",
            "--tasks", "turnwise.envs.basic.lookup:tasks?n=3", "--task", "x",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        out, err = await process.communicate()
        assert (process.returncode, out) == (1, b"")
        assert "TaskError: --task x: turnwise.envs.basic.lookup:tasks?n=3 has no task with this id" in err.decode()

    async def test_port_out_of_range_is_refused(self) -> None:
        with pytest.raises(InferenceError, match=r"127.0.0.1:99999 cannot be bound .*choose another port, or 0"):
            await EnvServer(LookupEnv, "lookup").serve_http("127.0.0.1", 99999, print)

    async def test_no_answer_waits_for_a_delayed_acknowledgement(self) -> None:
        """asyncio leaves Nagle's algorithm on where a listener was made elsewhere: 40 ms for an answer in two parts."""
        addresses: asyncio.Queue[str] = asyncio.Queue()
        serving = asyncio.create_task(EnvServer(LookupEnv, "lookup").serve_http("127.0.0.1", 0, addresses.put_nowait))
        try:
            url = (await addresses.get()).split()[-1]
            async with Client(url) as client:
                await client.call_tool("team_of", {"person": "ana"})
                established = [
                    connection
                    for connection in psutil.Process().net_connections("tcp")
                    if connection.status == "ESTABLISHED"
                ]
                accepted = [connection for connection in established if connection.laddr.port == urlsplit(url).port]
                assert accepted
                for peer in accepted:
                    with socket.socket(fileno=os.dup(peer.fd)) as connection:
                        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def test_page_of_another_site_is_refused_on_any_address(self) -> None:
        addresses: asyncio.Queue[str] = asyncio.Queue()
        serving = asyncio.create_task(EnvServer(LookupEnv, "lookup").serve_http("0.0.0.0", 0, addresses.put_nowait))
        try:
            url = (await addresses.get()).replace("0.0.0.0", "127.0.0.1")
            async with aiohttp.ClientSession() as page:
                for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
                    async with page.post(url, json={}, headers=headers) as answer:
                        assert answer.status == 403
            async with Client(url) as client:
                assert texts(await client.call_tool("task", {}))
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


class TestToolEnvironment:
    def test_without_a_scorer(self) -> None:
        with pytest.raises(EnvError, match=r"'tool' has no scorer.*only_tools"):
            make("tool")

    async def test_prompt_system_and_scorer(self) -> None:
        env = make("tool", scorer="exact_match", system="Be exact.")
        messages, _ = await reset_env(env, Task("t", "2 + 2?", {"answer": "4"}))
        assert messages == [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "2 + 2?"}]
        result = await step_env(env, {"role": "assistant", "content": "4"})
        assert (result.reward, result.terminated) == (1.0, True)

    async def test_system_prompt_of_a_task_is_kept(self) -> None:
        env = make("tool", scorer="turnwise.envs.basic.task_env:only_tools", system="Be exact.")
        prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        messages, _ = await reset_env(env, Task("t", prompt))
        assert messages == prompt
        result = await step_env(env, {"role": "assistant", "content": "Hello"})
        assert result.info["rewards"] == {}
