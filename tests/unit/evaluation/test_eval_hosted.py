"""An evaluation whose policy is a hosted endpoint: by ``session.chat`` and through the address, recorded as text."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest
from aiohttp import web

from support.gateway.hosted_endpoint import KEY, Provider, provider
from turnwise.agents.core import Agent, Episode
from turnwise.cli import main
from turnwise.errors import SessionError, StructuredOutputError
from turnwise.evaluation.config import EvalConfig
from turnwise.gateway.config import HostedConfig, base_url
from turnwise.gateway.proxy.client import HostedClient
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import read_trajectories
from turnwise.types import Guide, Message, SamplingParams, ToolCall

TASKS = "turnwise.envs.basic.lookup:tasks?n=2&split=test"


def next_step(question: str, answers: list[str]) -> tuple[str, dict[str, str]] | str:
    """What a model says that can look things up."""
    if not answers:
        return "team_of", {"person": question.removeprefix("Who manages ").rstrip("?")}
    return ("manager_of", {"team": answers[0]}) if len(answers) == 1 else answers[1]


async def knows(request: web.Request) -> web.StreamResponse:
    """A model that solves the lookup, over Chat Completions and Anthropic Messages."""
    body = await request.json()
    if body.get("temperature") == 0.25:
        return web.json_response({"error": {"message": "overloaded"}}, status=529)
    number = len(body["messages"])
    if request.path.endswith("/messages"):
        blocks = [b for m in body["messages"] if isinstance(m["content"], list) for b in m["content"]]
        step = next_step(body["messages"][0]["content"], [b["content"] for b in blocks if b["type"] == "tool_result"])
        content: dict[str, Any] = {"type": "text", "text": step}
        if isinstance(step, tuple):
            content = {"type": "tool_use", "id": f"toolu_{number}", "name": step[0], "input": step[1]}
        answer = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": [content]}
        answer |= {"stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 9, "output_tokens": 4}}
        return web.json_response(answer)
    step = next_step(body["messages"][0]["content"], [m["content"] for m in body["messages"] if m["role"] == "tool"])
    message: dict[str, Any] = {"role": "assistant", "content": step}
    if isinstance(step, tuple):
        function = {"name": step[0], "arguments": json.dumps(step[1])}
        message |= {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    reason = "tool_calls" if isinstance(step, tuple) else "stop"
    completion = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": body["model"]}
    completion["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
    completion["usage"] = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    return web.json_response(completion)


class OverChat(Agent):
    """OpenAI's own client, which knows nothing but an address."""

    async def run(self, episode: Episode) -> None:
        base = await episode.address()
        messages: list[Any] = [{"role": m["role"], "content": m["content"]} for m in episode.observation]
        tools: Any = [tool.to_json() for tool in episode.tools]
        async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="any", max_retries=0) as client:
            while True:
                completion = await client.chat.completions.create(model="theirs", messages=messages, tools=tools)
                choice = completion.choices[0]
                messages.append(choice.message.model_dump(exclude_none=True))
                calls = choice.message.tool_calls or []
                if not calls:
                    message: Message = {"role": "assistant", "content": choice.message.content or ""}
                    await episode.step(message)
                    return
                for call in calls:
                    assert call.type == "function"
                    tool_call = ToolCall(call.id, call.function.name, json.loads(call.function.arguments))
                    answer = (await episode.call(tool_call)).text
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})


class OverMessages(Agent):
    """Anthropic's own client."""

    async def run(self, episode: Episode) -> None:
        base = await episode.address()
        messages: list[Any] = [{"role": m["role"], "content": m["content"]} for m in episode.observation]
        tools: Any = [
            {"name": t.name, "description": t.description, "input_schema": t.parameters} for t in episode.tools
        ]
        async with anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as client:
            while True:
                answer = await client.messages.create(
                    model="theirs", messages=messages, tools=tools, max_tokens=99, extra_body={"temperature": 0.5}
                )
                messages.append(
                    {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]}
                )
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    await episode.step(
                        {"role": "assistant", "content": "".join(b.text for b in answer.content if b.type == "text")}
                    )
                    return
                tool_calls = [ToolCall(call.id, call.name, dict(call.input)) for call in calls]
                results = [(call.id, (await episode.call(call)).text) for call in tool_calls]
                content = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in results]
                messages.append({"role": "user", "content": content})


async def evaluate(there: Provider, out: Path, *more: str) -> int:
    """Run the command in a thread of its own: the endpoint answers in this one."""
    words = ["eval", "lookup", "--url", there.url, "--key-env", "TEST_EVAL_KEY", "hosted.model=big"]
    words += ["--tasks", TASKS, "-n", "2", "--out", str(out), "rollout.max_turns=5", *more]

    def run() -> int:
        with pytest.raises(SystemExit) as exited:
            main(words)
        return 0 if exited.value.code is None else int(exited.value.code)

    return await asyncio.to_thread(run)


@pytest.mark.parametrize("agent", ["react", f"{__name__}:OverChat", f"{__name__}:OverMessages"])
async def test_an_endpoint_is_evaluated(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_EVAL_KEY", KEY)
    out = tmp_path / "out"
    async with provider(knows) as there:
        assert await evaluate(there, out, "--agent", agent, "rollout.temperature=0.7") == 0
        printed = capsys.readouterr().out
        bodies = [json.loads(request.body) for request in there.posted]
        assert {body["model"] for body in bodies} == {"big"}
        assert len(bodies) == 12
        if agent == "react":
            assert {body["temperature"] for body in bodies} == {0.7}
            calls = [call for body in bodies for m in body["messages"] for call in m.get("tool_calls", ())]
            assert {tuple(call) for call in calls} == {("id", "type", "function")}
    summary = orjson.loads((out / "summary.json").read_bytes())["sampled"]
    assert summary["success"] == {"mean": 1.0, "stderr": 0.0, "episodes": 4, "tasks": 2}
    assert (summary["turns"], summary["sampled_tokens"], summary["forks"], summary["failed"]) == (3, 12, {}, 0)
    assert re.search(r"tokens sampled\s+12\.0", printed)
    trajectories = list(read_trajectories(out / "trajectories.twz"))
    assert [trajectory.recorded for trajectory in trajectories] == ["text"] * 4
    temperature = {"react": 0.7, f"{__name__}:OverMessages": 0.5}.get(agent)
    for trajectory in trajectories:
        kinds = [segment.kind for segment in trajectory.segments]
        assert kinds == ["context", "sampled"] * 3
        assert trajectory.metrics.get("temperature") == temperature
        assert trajectory.turn_metrics["t0"]["completion_tokens"] == 4
        assert trajectory.turn_metrics["t0"].get("temperature") == temperature
    assert not (out / "ledger.jsonl").exists()
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    for words, code in ((["audit", str(out)], 1), (["view", str(out)], 0)):
        with pytest.raises(SystemExit) as exited:
            main(words)
        assert (exited.value.code or 0) == code
    output = capsys.readouterr()
    assert "there is nothing to audit" in output.err
    assert "recorded as text" in output.out


@pytest.mark.parametrize(
    "agent", ["react", f"{__name__}:OverChat", pytest.param(f"{__name__}:OverMessages", marks=pytest.mark.long)]
)
async def test_the_best_of_several_answers_of_an_endpoint(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_EVAL_KEY", KEY)
    out = tmp_path / "out"
    search = ["search.kind=best_of_n", "search.samples=3", "search.scorer=environment"]
    async with provider(knows) as there:
        assert await evaluate(there, out, "--agent", agent, *search) == 0
        # Also programs of their own begin anew for each way, at an address of its own.
        assert len(there.posted) == 2 * 2 * 3 * 3
    capsys.readouterr()
    summary = orjson.loads((out / "summary.json").read_bytes())["sampled"]
    assert (summary["success"]["mean"], summary["turns"], summary["sampled_tokens"]) == (1.0, 3, 12)
    assert (summary["search"]["ways"], summary["search"]["sampled_tokens"]) == (3, 36)
    for trajectory in read_trajectories(out / "trajectories.twz"):
        assert [len(branch.turns) for branch in trajectory.branches] == [3, 3, 3]
        # What other ways said alike is not taken for what this one said.
        for branch in trajectory.branches:
            last_turn = next(candidate for candidate in trajectory.turns() if candidate.turn_id == branch.turns[-1])
            path_turns = [trajectory.segments[index].turn_id for index in last_turn.path]
            assert [turn_id for turn_id in path_turns if turn_id] == list(branch.turns[:-1])


async def test_an_endpoint_that_fails_gives_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_EVAL_KEY", KEY)
    async with provider(knows) as there:
        out = tmp_path / "out"
        assert await evaluate(there, out, "rollout.temperature=0.25", "rollout.retries=0") == 1
    output = capsys.readouterr()
    assert "answered 529" in output.err
    trajectories: list[Trajectory] = list(read_trajectories(out / "trajectories.twz"))
    assert {trajectory.stop_reason for trajectory in trajectories} == {"error"}
    assert all(not trajectory.segments for trajectory in trajectories)


REFUSED = r"the hosted endpoint http://127\.0\.0\.1:\d+/v1 refused the key"


@pytest.mark.parametrize(
    ("listing", "status", "words", "requests", "why"),
    [
        (401, 401, ["--agent", "react"], 0, rf"{REFUSED} \(401\): correct TEST_EVAL_KEY, named by hosted\.key_env"),
        (200, 401, ["--agent", f"{__name__}:OverChat"], 2, rf"{REFUSED} \(401\)"),
        (401, 401, ["hosted.key_env=null"], 0, r"name the environment variable of a key in hosted\.key_env \("),
        (403, 403, [], 2, rf"{REFUSED} \(403\)"),
        (403, 403, ["--agent", f"{__name__}:OverChat"], 2, rf"{REFUSED} \(403\)"),
        (404, 404, [], 2, r"1:\d+/v1 answered 404: .*no such.*; correct url or hosted\.model \(big\)"),
        (200, 200, ["hosted.model=null"], 0, r"hosted\.model is missing: agent 'react' .* http://\S+/v1/models lists"),
    ],
)
async def test_an_endpoint_that_answers_nobody_ends_the_evaluation_at_once(
    listing: int, status: int, words: list[str], requests: int, why: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    async def refuse(request: web.Request) -> web.StreamResponse:
        body = {"error": {"message": "no such thing"}}
        return web.json_response(body, status=listing if request.method == "GET" else status)

    monkeypatch.setenv("TEST_EVAL_KEY", KEY)
    async with provider(refuse) as there:
        assert await evaluate(there, tmp_path / "out", "rollout.concurrency=1", *words) == 1
        # The next episode may have begun; 4 would be played, of 3 tries each.
        assert len(there.posted) <= requests
    assert len(re.findall(why, capsys.readouterr().err)) == 1


async def test_an_endpoint_without_a_server_ends_the_evaluation_before_its_first_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_EVAL_KEY", KEY)
    async with provider(knows) as there:
        pass
    assert await evaluate(there, tmp_path / "out") == 1
    assert f"{base_url(there.url)} cannot be reached (Connect call failed" in capsys.readouterr().err
    assert not list(read_trajectories(tmp_path / "out" / "trajectories.twz"))


def test_settings_that_hosted_endpoints_lack_are_refused(tmp_path: Path) -> None:
    rollout = RolloutConfig(env=SpecConfig(name="lookup"))
    url = "https://a.test/v1"
    with pytest.raises(ValueError, match="no greedy together with hosted"):
        EvalConfig(url=url, hosted=HostedConfig(), greedy=True, rollout=rollout)
    assert not EvalConfig(url=url, hosted=HostedConfig(), rollout=rollout).greedy
    for search, message in (
        ({"kind": "tree", "branches": 2, "scorer": "environment"}, "search.kind best_of_n instead of tree"),
        ({"kind": "best_of_n", "samples": 2, "scorer": "likelihood"}, "another search.scorer than likelihood"),
    ):
        with pytest.raises(ValueError, match=message):
            EvalConfig(url=url, hosted=HostedConfig(), greedy=False, rollout=rollout, search=search)
    with pytest.raises(ValueError, match=r"no model, rollout\.top_k together"):
        EvalConfig(
            url=url,
            hosted=HostedConfig(),
            greedy=False,
            model=tmp_path,
            rollout=rollout.model_copy(update={"top_k": 5}),
        )
    with pytest.raises(ValueError, match="model, the directory"):
        EvalConfig(url=url, rollout=rollout, model=None)
    with pytest.raises(ValueError, match="url of one endpoint"):
        EvalConfig(hosted=HostedConfig(), greedy=False, rollout=rollout)


async def test_session_parameters_are_sent_or_refused() -> None:
    async with provider(knows) as there:
        client = HostedClient(Endpoint(base_url(there.url), HostedConfig(), KEY), model="big")
        session = client.open(id="e", params=SamplingParams(temperature=0.7), max_tokens_per_turn=50)
        messages: list[Message] = [{"role": "user", "content": "Who manages Ada?"}]
        # What a request does not say itself is the run's.
        await session.chat(messages, params=replace(session.params, seed=4, stop=("\n",), max_tokens=9))
        body = json.loads(there.seen[-1].body)
        assert {key: value for key, value in body.items() if key not in ("model", "messages")} == {
            "temperature": 0.7,
            "max_completion_tokens": 9,
            "seed": 4,
            "stop": ["\n"],
        }
        assert session.turn_metrics["t0"]["seed"] == 4
        with pytest.raises(StructuredOutputError, match=r"remove params\.guide"):
            await session.chat(messages, params=replace(session.params, guide=Guide(schema={"type": "object"})))
        for field, value in (("top_k", 5), ("min_p", 0.1), ("stop_token_ids", (3,)), ("ignore_eos", True)):
            with pytest.raises(SessionError, match=rf"params\.{field}"):
                await session.chat(messages, params=replace(session.params, **{field: value}))
        assert len(there.seen) == 1
        await client.close()
