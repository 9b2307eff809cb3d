"""The environment's tools over HTTP and MCP: every call goes through the episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.agents.blackbox_episodes import LINES, TABLE, Broken, say, team
from support.chat.model_dirs import renderer_for
from turnwise.agents.core import Episode, EpisodeHost, EpisodeSetup
from turnwise.agents.limits import EpisodeLimits
from turnwise.envs.basic.guess_number import GuessNumberEnv
from turnwise.envs.basic.lookup import LookupEnv
from turnwise.envs.core import Env, reset_env, schemas
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.errors import EnvError
from turnwise.ext.programs.tool_server import EpisodeOver, ToolServer
from turnwise.ext.programs.workdir import Workdir
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.tasks import Task


@contextlib.asynccontextmanager
async def offered(
    env: Env, script: list[Any] = LINES, *, with_reply: bool = False
) -> AsyncIterator[tuple[ToolServer, Episode, aiohttp.ClientSession]]:
    renderer = renderer_for("qwen3")
    client = ScriptedClient(renderer, script)
    task = Task("t", "go")
    observation, info = await reset_env(env, task, seed=7)

    def open_session(name: str, policy: str) -> Session:
        del policy
        return Session(client, renderer, id=name, limits=SessionLimits(context_length=5000))

    setup = EpisodeSetup(task, 7, observation, info, schemas(env), EpisodeLimits(9, None, 5000))
    episode = Episode(env, setup, EpisodeHost(open_session))
    tools = await ToolServer.start(episode, with_reply=with_reply)
    try:
        async with aiohttp.ClientSession() as http:
            yield tools, episode, http
    finally:
        await tools.close()


async def test_plain_calls() -> None:
    async with offered(LookupEnv()) as (tools, episode, http):
        listed = await (await http.get(tools.url)).json()
        assert listed == {"tools": [tool.to_json() for tool in episode.tools]}
        message = await episode.session.chat(episode.observation, episode.tools)

        async def post(name: str, body: str, **headers: str) -> tuple[int, Any]:
            async with http.post(f"{tools.url}/{name}", data=body, headers=headers) as answer:
                return answer.status, await answer.json()

        arguments = json.dumps({"person": TABLE.person})
        assert await post("team_of", arguments) == (200, {"content": TABLE.teams[TABLE.person], "error": None})
        # It is counted on the turn that made it, whether its id is said or not.
        assert episode.turn_metrics["main", message["turn_id"]]["tool_calls"] == 1
        call_id = message["tool_calls"][0].id
        await post("team_of", arguments, **{"x-tool-call-id": call_id})
        assert episode.turn_metrics["main", message["turn_id"]]["tool_calls"] == 2
        # What is wrong is told to the model, as in any other loop.
        for name, body, word in (("team_of", '{"person": 3}', "invalid_arguments"), ("team_of", "[1]", "invalid_json")):
            status, answer = await post(name, body)
            assert (status, answer["error"]) == (200, word), answer
        assert (await post("team_of", '{"person": "nobody"}'))[1]["error"] == "tool_error"
        assert episode.metrics["tool_errors"] == 3
        for url, expected in ((tools.url + "x", 404), (tools.url.replace("/tools/", "/other/"), 404)):
            assert (await http.get(url)).status == expected
        assert (await http.get(tools.url + "/team_of")).status == 405
        # Three calls in a row that reach no tool end the episode, and the program is told so.
        assert [(await post("nothing", "{"))[0] for _ in range(4)] == [200, 200, 409, 409]
        assert tools.ended.is_set()


async def test_an_environment_that_fails_is_an_error_of_the_episode() -> None:
    async with offered(Broken()) as (tools, _, http):
        async with http.post(f"{tools.url}/team_of", json={"person": "ana"}) as answer:
            assert answer.status == 409
        assert isinstance(tools.failure, EnvError)


async def test_a_real_mcp_client() -> None:
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    async with offered(LookupEnv(), [say("", team())]) as (tools, episode, _):
        message = await episode.session.chat(episode.observation, episode.tools)
        async with streamable_http_client(tools.mcp_url) as streams, ClientSession(streams[0], streams[1]) as client:
            await client.initialize()
            listed = (await client.list_tools()).tools
            assert [tool.name for tool in listed] == ["team_of", "manager_of"]
            assert listed[0].input_schema == episode.tools[0].parameters
            result = await client.call_tool("team_of", {"person": TABLE.person})
            assert (result.content[0].text, result.is_error) == (TABLE.teams[TABLE.person], False)
            wrong = await client.call_tool("team_of", {"person": "nobody"})
            assert wrong.is_error
            assert "there is no person" in wrong.content[0].text
        assert episode.turn_metrics["main", message["turn_id"]]["tool_calls"] == 2


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ("{", 400, {"error": {"code": -32700, "message": "the body is not JSON"}, "id": None}),
        ('{"jsonrpc": "2.0", "method": "notifications/initialized"}', 202, None),
        ('{"jsonrpc": "2.0", "id": 1, "method": "ping"}', 200, {"id": 1, "result": {}}),
        ('{"jsonrpc": "2.0", "id": 1, "result": {}}', 202, None),
        ('[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]', 200, [{"id": 1, "jsonrpc": "2.0", "result": {}}]),
    ],
)
async def test_messages_of_mcp(body: str, status: int, expected: Any) -> None:
    async with offered(LookupEnv()) as (tools, _, http), http.post(tools.mcp_url, data=body) as answer:
        assert answer.status == status
        if expected is not None:
            assert await answer.json() == (expected if isinstance(expected, list) else {"jsonrpc": "2.0", **expected})
    async with offered(LookupEnv()) as (tools, _, http):
        unknown = {"jsonrpc": "2.0", "id": 7, "method": "resources/list"}
        async with http.post(tools.mcp_url, json=unknown) as answer:
            assert (await answer.json())["error"]["code"] == -32601
        assert (await http.get(tools.mcp_url)).status == 405


async def test_the_command_of_shells(tmp_path: Path) -> None:
    async with offered(LookupEnv()) as (tools, _, _http):
        command = Workdir.make(tmp_path, None, None).install_tool(tools.url) / "tool"

        async def tool(*arguments: str) -> tuple[int, str]:
            ran = await asyncio.to_thread(
                subprocess.run, [command, *arguments], capture_output=True, text=True, env={}, check=False
            )
            return ran.returncode, ran.stdout.strip() or ran.stderr.strip()

        team = TABLE.teams[TABLE.person]
        assert await tool("team_of", json.dumps({"person": TABLE.person})) == (0, team)
        assert await tool("team_of", f"person={TABLE.person}") == (0, team)
        code, output = await tool("team_of", "person=nobody")
        assert (code, "there is no person" in output) == (1, True)
        code, output = await tool()
        assert (code, [tool["function"]["name"] for tool in json.loads(output)]) == (0, ["team_of", "manager_of"])
        await tools.shut()
        code, output = await tool("team_of", "person=ana")
        assert (code, "the episode is over" in output) == (1, True)


async def test_messages_sent_at_the_same_time_are_scored_once() -> None:
    judged = asyncio.Event()

    async def scorer() -> float:
        await judged.wait()
        return 1.0

    async with offered(SingleTurnEnv(scorer), [say("50")], with_reply=True) as (tools, episode, _):
        await episode.session.chat(episode.observation, [])
        first, second = (asyncio.ensure_future(tools.call("reply", {"text": "50"})) for _ in range(2))
        await asyncio.sleep(0)
        judged.set()
        assert (await first).error is None
        with pytest.raises(EpisodeOver):
            await second
        assert [reward.value for reward in episode.rewards] == [1.0]


async def test_a_program_speaks_to_an_environment_that_answers() -> None:
    async with offered(GuessNumberEnv(), [say("50")], with_reply=True) as (tools, episode, _):
        message = await episode.session.chat(episode.observation, [])
        assert [schema.name for schema in tools.schemas] == ["reply"]
        response = await tools.call("reply", {"text": "50"})
        assert response.text
        assert not tools.ended.is_set()
        assert (await tools.call("reply", {"text": 5})).error == "invalid_arguments"
        assert {reward.turn_id for reward in episode.rewards} <= {message["turn_id"]}
