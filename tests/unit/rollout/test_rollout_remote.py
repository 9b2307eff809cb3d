"""Remote runners: the same episodes, played elsewhere; who may, who is lost, and what comes late."""

from __future__ import annotations

import asyncio
import functools
import operator
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from support.agents.user_agents import Cancels, Endless, Held, Malformed, Notes, Raises
from support.chat.model_dirs import renderer_for
from support.event_loop import pass_time
from turnwise.agents.core import Agent
from turnwise.agents.react import ReActAgent
from turnwise.agents.registry import make_agent
from turnwise.config import load_config
from turnwise.errors import ConfigError, InferenceError
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.rollout import RolloutConfig, RolloutParts, RolloutProducer, RolloutRequest
from turnwise.rollout.remote.protocol import VERSION, dump, load, read_error, read_message
from turnwise.rollout.remote.runner import RunnerOptions, read_key, serve_run
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory
from turnwise.types import StopReason, ToolCall


def solver(request: ScriptedRequest):
    """Looks up and answers, with exact numbers of many digits on the way."""
    if "Who manages" not in request.text:
        return "fine"
    if request.number == 0:
        person = request.text.partition("Who manages ")[2].partition("?")[0]
        return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "team_of", {"person": person})]}
    team = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", request.text)[-1]
    if request.number == 1:
        return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "manager_of", {"team": team})]}
    return team


class Run:
    """A run whose episodes runners play."""

    def __init__(self, producer: RolloutProducer, written: list[Trajectory], log: list[str], key: Path) -> None:
        self.producer, self.written, self.said, self.key = producer, written, log, key
        self.url = producer._runner.gateway.url

    def options(self, **changes: Any) -> RunnerOptions:
        return RunnerOptions(**{"url": self.url, "key": read_key(self.key), "places": 4, **changes})

    def runner(self, agent: Agent, **changes: Any) -> asyncio.Task[None]:
        return asyncio.create_task(serve_run(self.options(**changes), agent, self.said.append))

    async def ask(self, *ids: str, size: int = 1):
        return await self.producer.gather([RolloutRequest(Task(task_id, "go"), group_size=size) for task_id in ids])


@asynccontextmanager
async def running(folder: Path, script: Any = solver, **rollout: Any) -> AsyncIterator[Run]:
    key = folder / "run.key"
    section = {"env": {"name": "lookup"}, "remote": {"key_file": str(key), **rollout.pop("remote", {})}, **rollout}
    renderer = renderer_for("qwen3")
    written: list[Trajectory] = []
    notices: list[str] = []
    parts = RolloutParts(renderer, write=written.append, notify=notices.append)
    config = load_config(RolloutConfig, defaults=section)
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, script), None, parts)
    try:
        async with asyncio.timeout(90):
            yield Run(producer, written, notices, key)
    finally:
        await producer.close()


async def stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def content(trajectory: Trajectory) -> list[Any]:
    return [(s.kind, s.parent, s.token_ids.tolist(), s.fork) for s in trajectory.segments]


async def test_remote_agent_records_the_same_as_a_local_agent(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        playing = run.runner(ReActAgent())
        groups = await run.ask("a", "b", size=2)
        await run.producer.close()
        await playing
    config = load_config(RolloutConfig, defaults={"env": {"name": "lookup"}})
    renderer = renderer_for("qwen3")
    local = await RolloutProducer.create(config, ScriptedClient(renderer, solver), None, RolloutParts(renderer))
    try:
        local_groups = await local.gather([RolloutRequest(Task(task_id, "go"), group_size=2) for task_id in ("a", "b")])
    finally:
        await local.close()
    for theirs, ours in zip(groups, local_groups, strict=True):
        assert [trajectory.reward for trajectory in theirs.trajectories] == [1.0, 1.0]
        for there, here in zip(theirs.trajectories, ours.trajectories, strict=True):
            assert content(there) == content(here)
            assert there.rewards == here.rewards
            assert [metrics.get("tool_calls") for metrics in there.turn_metrics.values()] == [
                metrics.get("tool_calls") for metrics in here.turn_metrics.values()
            ]
            assert there.stop_reason == here.stop_reason
    assert any(f"turnwise runner --connect {run.url}" in text for text in run.said)
    assert run.said[-1] == "the run has ended"
    assert run.key.stat().st_mode & 0o077 == 0


async def test_an_agent_that_knows_an_address_brings_its_own_reward(tmp_path: Path) -> None:
    async with running(tmp_path, lambda request: "four") as run:
        playing = run.runner(make_agent("support.agents.user_agents:by_address"))
        [group] = await run.ask("a")
        await stop(playing)
    [trajectory] = group.trajectories
    assert trajectory.rewards == [(None, "reward", 4.0)]
    assert sum(1 for _ in trajectory.turns()) == 1


async def test_rewards_metrics_sessions_and_the_end_are_the_agent_s(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        playing = run.runner(Notes())
        [group] = await run.ask("a")
        await stop(playing)
    main, critic = group.trajectories
    [turn] = main.turns()
    assert (turn.turn_id, "mine", 0.5) in main.rewards
    assert main.stop_reason is StopReason.MAX_TOKENS
    assert main.metrics["looked"] == 2.0
    assert main.turn_metrics[turn.turn_id]["looked"] == 2.0
    assert [name for _, name, _ in critic.rewards] == ["hers"]


async def test_limits_of_the_run_end_an_agent_there(tmp_path: Path) -> None:
    async with running(tmp_path, lambda request: "and", max_turns=3) as run:
        playing = run.runner(Endless())
        [group] = await run.ask("a")
        await stop(playing)
    [trajectory] = group.trajectories
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.error is None


async def test_an_exception_of_a_remote_agent_is_an_error_without_reward(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        playing = run.runner(Raises())
        [group] = await run.ask("a")
        await stop(playing)
    assert (group.trajectories, group.failed) == ([], 1)
    assert [trajectory.error for trajectory in run.written] == [
        "AgentError: the agent raised LookupError: the index is empty"
    ]


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (Cancels(), "AgentError: the agent raised CancelledError without being cancelled"),
        (Malformed(), "FormatError: a message is an object with a role"),
        (ReActAgent(context={"compaction": {}}), "SessionError: .* prompts cannot be measured at a runner: leave"),
    ],
)
async def test_a_fault_of_the_agent_ends_its_episode_once(tmp_path: Path, agent: Agent, expected: str) -> None:
    async with running(tmp_path, retries=0) as run:
        playing = run.runner(agent)
        [group] = await run.ask("a")
        await stop(playing)
    assert (group.trajectories, group.failed) == ([], 1)
    [trajectory] = run.written
    assert re.match(expected, trajectory.error or ""), trajectory.error
    assert not trajectory.rewards


@pytest.mark.parametrize("name", ["per_turn", "per_turn_by_address"])
async def test_an_agent_there_rewards_its_turns(tmp_path: Path, name: str) -> None:
    async with running(tmp_path, lambda request: "four") as run:
        playing = run.runner(make_agent(f"support.agents.user_agents:{name}"))
        [group] = await run.ask("a")
        await stop(playing)
    [trajectory] = group.trajectories
    turns = [turn.turn_id for turn in trajectory.turns()]
    assert trajectory.rewards == [(turns[0], "reward", 0.25), (turns[1], "reward", 0.5)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:create_react_agent")
@pytest.mark.parametrize("streams", [False, True])
async def test_remote_graph_plays_as_a_local_graph(tmp_path: Path, streams: bool) -> None:
    def graph(model: Any, tools: Any) -> Any:
        async def ask(state: MessagesState) -> dict[str, Any]:
            bound = model.bind_tools(tools)
            if not streams:
                return {"messages": [await bound.ainvoke(state["messages"])]}
            chunks = [chunk async for chunk in bound.astream(state["messages"])]
            return {"messages": [functools.reduce(operator.add, chunks)]}

        builder = StateGraph(MessagesState)
        builder.add_node("ask", ask)
        builder.add_node("tools", ToolNode(tools))
        builder.add_edge(START, "ask")
        builder.add_conditional_edges("ask", tools_condition)
        builder.add_edge("tools", "ask")
        return builder

    async with running(tmp_path, retries=0) as run:
        playing = run.runner(make_agent("langgraph", graph=graph))
        [group] = await run.ask("a")
        await stop(playing)
    assert [trajectory.error for trajectory in run.written] == [None]
    [trajectory] = group.trajectories
    assert (trajectory.reward, sum(1 for _ in trajectory.turns())) == (1.0, 3)
    assert not trajectory.forks()


@pytest.mark.ext
async def test_tool_calls_of_a_remote_program_are_counted_on_their_turns(tmp_path: Path) -> None:
    from support.agents.blackbox_episodes import CHAT_LOOP

    async with running(tmp_path, retries=0) as run:
        playing = run.runner(make_agent("blackbox", command=CHAT_LOOP))
        [group] = await run.ask("a")
        await stop(playing)
    assert [trajectory.error for trajectory in run.written] == [None]
    [trajectory] = group.trajectories
    assert trajectory.reward == 1.0
    called = [trajectory.turn_metrics.get(turn.turn_id, {}).get("tool_calls", 0) for turn in trajectory.turns()]
    assert called == [1, 1, 0]


@pytest.mark.ext
async def test_a_remote_program_that_fails_is_retried(tmp_path: Path) -> None:
    async with running(tmp_path, retries=1) as run:
        playing = run.runner(make_agent("blackbox", command="false"))
        [group] = await run.ask("a")
        await stop(playing)
    assert (group.trajectories, group.failed) == ([], 1)
    assert [trajectory.attempt for trajectory in run.written] == [0, 1]
    assert all("StartError: the program 'false' failed" in (trajectory.error or "") for trajectory in run.written)


async def test_a_server_that_fails_is_the_run_s_own_error(tmp_path: Path) -> None:
    def broken(request: ScriptedRequest):
        raise InferenceError("the engine died")

    async with running(tmp_path, broken, retries=1) as run:
        playing = run.runner(ReActAgent())
        [group] = await run.ask("a")
        await stop(playing)
    assert group.failed == 1
    assert [trajectory.error for trajectory in run.written] == ["InferenceError: the engine died"] * 2


async def test_episodes_of_a_lost_runner_are_played_again_and_late_requests_refused(tmp_path: Path) -> None:
    async with running(tmp_path, retries=0) as run:
        agent = Held()
        first = run.runner(agent)
        sampling = asyncio.create_task(run.ask("a"))
        await agent.begun.wait()
        late = agent.episode
        assert late is not None
        address = await late.address()
        await stop(first)
        assert agent.cancelled.is_set()
        second = run.runner(ReActAgent())
        [group] = await sampling
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{address}/v1/chat/completions", json={"messages": []}) as answer:
                assert answer.status == 404, "its address went with it"
            headers = {"Authorization": f"Bearer {read_key(run.key)}"}
            for what in ("result", "chat"):
                async with http.post(f"{late._lease._url}/{what}", data=b"{}", headers=headers) as answer:
                    assert answer.status == 410
        await stop(second)
    [trajectory] = group.trajectories
    assert (trajectory.attempt, trajectory.reward, group.failed) == (1, 1.0, 0)
    lost = next(trajectory for trajectory in run.written if trajectory.attempt == 0)
    assert lost.error is not None
    assert lost.error.startswith("RunnerDisconnected: runner ")
    assert not lost.rewards
    assert "no runner is connected: episodes wait for one" in run.said


async def test_a_runner_without_heartbeats_is_dropped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("turnwise.rollout.remote.service.LOST_AFTER_S", 0.5)
    async with running(tmp_path) as run, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {read_key(run.key)}"}
        hello = dump({"version": VERSION, "name": "mute", "places": 1})
        async with http.post(f"{run.url}/runners/line", data=hello, headers=headers) as line:
            sampling = asyncio.create_task(run.ask("a"))
            events = [load(await line.content.readline()) for _ in range(2)]
            assert [event["event"] for event in events] == ["hello", "work"]
            playing = run.runner(ReActAgent())
            [group] = await sampling
            await stop(playing)
    assert group.trajectories[0].attempt == 1
    assert any("mute is gone: no heartbeat for 0.5 s" in text for text in run.said)


async def test_several_runners_share_and_more_episodes_than_places_wait(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        one, two = run.runner(ReActAgent(), places=1, name="one"), run.runner(ReActAgent(), places=1, name="two")
        groups = await run.ask(*map(str, range(6)))
        await stop(one, two)
    assert [group.trajectories[0].reward for group in groups] == [1.0] * 6


async def test_who_cancels_the_run_stops_the_agent_there(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        agent = Held()
        playing = run.runner(agent)
        sampling = asyncio.create_task(run.ask("a"))
        await agent.begun.wait()
        await stop(sampling)
        await agent.cancelled.wait()
        assert not playing.done(), "the runner stays for the next episode"
        [group] = await run.ask("b")
        await stop(playing)
    assert group.trajectories[0].reward == 1.0
    assert run.written[0].stop_reason is StopReason.CANCELLED


async def test_a_timeout_stops_the_remote_agent_and_excludes_the_wait_for_a_runner(tmp_path: Path) -> None:
    # Less than the time after which a silent runner is given up.
    async with running(tmp_path, episode_timeout=20.0) as run:
        sampling = asyncio.create_task(run.ask("a"))
        await asyncio.sleep(0.1)
        pass_time(21)
        agent = Held()
        playing = run.runner(agent)
        await agent.begun.wait()
        pass_time(21)
        [group] = await sampling
        await agent.cancelled.wait()
        await stop(playing)
    assert group.trajectories[0].stop_reason is StopReason.TIMEOUT
    assert group.trajectories[0].attempt == 0


async def test_a_runner_without_the_key_is_refused_and_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        with pytest.raises(ConfigError, match="wrong key"):
            await serve_run(run.options(key="a wrong one"), ReActAgent(), run.said.append)
        async with aiohttp.ClientSession() as http, http.post(f"{run.url}/runners/line", data=b"{}") as answer:
            assert answer.status == 401
        headers = {"Authorization": f"Bearer {read_key(run.key)}"}
        for body, refusal in ((b'{"version": 99, "places": 1}', "speaks version 99"), (b"[]", "where a JSON object")):
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(f"{run.url}/runners/line", data=body) as a,
            ):
                assert a.status == 400
                assert refusal in (await a.json())["error"]["message"]


async def test_a_runner_waits_for_a_run_up_to_its_wait_option(tmp_path: Path) -> None:
    notices: list[str] = []
    options = RunnerOptions("http://127.0.0.1:9", "key", wait=0.2)
    with pytest.raises(InferenceError, match=r"no run was at http://127.0.0.1:9 for 0.2 s"):
        await serve_run(options, ReActAgent(), notices.append)
    assert notices[0].startswith("no run answers at http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"--key-file .* cannot be read"):
        read_key(tmp_path / "none")


def test_remote_together_with_a_custom_manager_is_refused(tmp_path: Path) -> None:
    section = {"env": {"name": "lookup"}, "remote": {"key_file": "k"}, "agent_loop_manager_class": "a.b"}
    with pytest.raises(ConfigError, match="either remote or agent_loop_manager_class"):
        load_config(RolloutConfig, defaults=section)


def test_messages_and_errors_come_over_as_they_are() -> None:
    call = ToolCall("c1", "add", {"a": 2**80, "b": 0.1}, raw="{}", error=None)
    message = {"role": "assistant", "content": "é\ud800", "tool_calls": [call], "turn_id": "t"}
    read = read_message(load(dump(message)))
    assert read["tool_calls"] == [call]
    foreign = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": {}}]}
    assert read_message(load(dump(foreign))) == foreign
    assert type(read_error({"type": "InferenceError", "message": "m"})) is InferenceError
    assert str(read_error({"type": "ZeroDivisionError", "message": "m"})) == "the agent raised ZeroDivisionError: m"
