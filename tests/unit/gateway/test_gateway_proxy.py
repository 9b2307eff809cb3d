"""A gateway in front of a gateway: what a hosted endpoint says is recorded as that endpoint's own recorder has it.

The endpoint is a gateway over a scripted model, which speaks all three APIs. Its recorder knows tokens, so what it says
of turns, branches, forks and messages is what the one in front of it must say of the text alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.gateway.hosted_endpoint import Hosted, hosting
from support.gateway.server import Served, serving
from turnwise.errors import TrainError
from turnwise.inference.scripted import ScriptedRequest
from turnwise.trajectory import Segment, Trajectory, to_samples
from turnwise.types import Message, ToolCall, ToolSchema

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOL = ToolSchema("add", "Adds.", ADD)
CALLS: Message = {
    "role": "assistant",
    "content": "Two sums.",
    "reasoning_content": "Hm.\n",
    "tool_calls": [ToolCall("", "add", {"a": 1, "b": 2}), ToolCall("", "add", {"a": 3, "b": 4})],
}
DONE: Message = {"role": "assistant", "content": "3 and 7.", "reasoning_content": "So."}
ROUTES = ("chat/completions", "responses", "messages")


def script(request: ScriptedRequest) -> Message:
    """Calls where it is told to."""
    return CALLS if "CALL<|im_end|>" in request.text[-50:] else DONE


class Agent:
    """Keeps a conversation in the items of one API."""

    def __init__(self, hosted: Hosted, opened: dict[str, Any], route: str, *, stream: bool) -> None:
        self.items: list[Any] = []
        self.route, self.stream = route, stream
        self._hosted, self._path = hosted, f"{opened['path']}/v1/{route}"

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    async def ask(self, **more: Any) -> Any:
        """Send the conversation; what is said is appended to it."""
        status, body = await self.send(**more)
        assert status == 200, body
        messages = self.said(body)
        self.items += messages
        return messages

    def answer(self, message: list[Any], *texts: str) -> None:
        """Answer the calls of a turn, the last one first: that says nothing."""
        if self.route == "responses":
            ids = [item["call_id"] for item in message if item["type"] == "function_call"]
            created = [
                {"type": "function_call_output", "call_id": i, "output": t} for i, t in zip(ids, texts, strict=True)
            ]
            self.items += created
        elif self.route == "messages":
            ids = [block["id"] for block in message[0]["content"] if block["type"] == "tool_use"]
            blocks = [{"type": "tool_result", "tool_use_id": i, "content": t} for i, t in zip(ids, texts, strict=True)]
            self.items.append({"role": "user", "content": blocks[::-1]})
        else:
            ids = [call["id"] for call in message[0]["tool_calls"]]
            self.items += [{"role": "tool", "tool_call_id": i, "content": t} for i, t in zip(ids, texts, strict=True)]

    async def send(self, **more: Any) -> tuple[int, Any]:
        body: dict[str, Any] = {"model": "m", "max_tokens": 900, "temperature": 0.5, "stream": self.stream, **more}
        if self.route == "responses":
            body |= {
                "input": self.items,
                "tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": ADD}],
            }
            body["max_output_tokens"] = body.pop("max_tokens")
        elif self.route == "messages":
            body |= {"messages": self.items, "tools": [{"name": "add", "description": "Adds.", "input_schema": ADD}]}
        else:
            tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
            body |= {"messages": self.items, "tools": [tool]}
            if self.stream:
                body["stream_options"] = {"include_usage": True}
        async with self._hosted.http.post(self._path, json=body) as answer:
            raw = await answer.read()
            return answer.status, events(raw) if answer.content_type == "text/event-stream" else json.loads(raw)

    def said(self, answered: Any) -> list[Any]:
        """What was said, as an agent that keeps everything sends it back."""
        if self.route == "responses":
            response = answered[-1]["response"] if isinstance(answered, list) else answered
            return list(response["output"])
        if self.route == "messages":
            return [
                {
                    "role": "assistant",
                    "content": blocks(answered) if isinstance(answered, list) else answered["content"],
                }
            ]
        return [chunked(answered) if isinstance(answered, list) else answered["choices"][0]["message"]]


def events(raw: bytes) -> list[Any]:
    return [json.loads(line) for line in re.findall(rb"^data: (\{.*\})\r?$", raw, re.MULTILINE)]


def blocks(response: list[Any]) -> list[Any]:
    pieces: list[Any] = []
    for event in response:
        if event["type"] == "content_block_start":
            pieces.append(dict(event["content_block"], json=""))
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            key = {"input_json_delta": "json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            pieces[-1][key] = pieces[-1].get(key, "") + delta.get("partial_json", delta.get(key, ""))
    for block in pieces:
        written = block.pop("json")
        if written:
            block["input"] = json.loads(written)
    return pieces


def chunked(response: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for event in response:
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append(
                        {"id": call["id"], "type": "function", "function": dict(call["function"])}
                    )
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if not message["tool_calls"]:
        del message["tool_calls"]
    return message


def told(segments: list[Segment]) -> list[tuple[Any, ...]]:
    """What a tree says besides its ids."""
    return [
        (
            segment.parent,
            segment.kind,
            segment.messages,
            segment.turn_id,
            segment.fork,
            segment.tools,
            segment.finish_reason,
        )
        for segment in segments
    ]


@asynccontextmanager
async def both(**settings: Any) -> AsyncIterator[tuple[Served, dict[str, Any], Hosted, dict[str, Any]]]:
    async with serving(script, tools=[TOOL]) as served:
        behind = await served.open(id="behind")
        async with hosting(behind["base"] + "/v1", **settings) as hosted:
            yield served, behind, hosted, await hosted.open(id="front")


async def linear(agent: Agent) -> None:
    agent.user("CALL")
    agent.answer(await agent.ask(), "3", "7")
    await agent.ask()
    agent.user("And now? CALL")
    agent.answer(await agent.ask(), "5", "6")
    await agent.ask()


async def edits(agent: Agent) -> None:
    agent.user("CALL")
    first = list(agent.items)
    agent.answer(await agent.ask(), "3", "7")
    history = list(agent.items)
    await agent.ask()
    agent.items = history[:]
    await agent.ask()  # sampled again
    agent.items = first[:]
    agent.user("Something else.")  # rewound
    await agent.ask()
    agent.items = []
    agent.user("A summary of what was said.")  # compacted
    await agent.ask()
    agent.user("Go on.")
    await agent.ask()


async def drops_reasoning(agent: Agent) -> None:
    agent.user("CALL")
    message = await agent.ask()
    if agent.route == "responses":
        agent.items = [item for item in agent.items if item.get("type") != "reasoning"]
    elif agent.route == "messages":
        agent.items[-1] = {
            **message[0],
            "content": [block for block in message[0]["content"] if block["type"] != "thinking"],
        }
    else:
        agent.items[-1] = {key: value for key, value in message[0].items() if key != "reasoning_content"}
    agent.answer(message, "3", "7")
    await agent.ask()


BEHAVIOURS: list[tuple[Callable[[Agent], Any], list[str]]] = [
    (linear, []),
    (edits, ["resample", "assistant_edited", "restart"]),
    (drops_reasoning, []),
]


@pytest.mark.parametrize(("behaviour", "forks"), BEHAVIOURS, ids=[behaviour.__name__ for behaviour, _ in BEHAVIOURS])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
async def test_proxy_records_the_same_tree_as_a_token_session(
    route: str, stream: bool, behaviour: Callable[[Agent], Any], forks: list[str]
) -> None:
    async with both() as (served, behind, hosted, opened):
        await behaviour(Agent(hosted, opened, route, stream=stream))
        session = served.session(behind)
        trajectory = await hosted.finalize(opened)
        assert told(trajectory.segments) == told(session.segments())
        assert [segment.fork for segment in trajectory.segments if segment.fork is not None] == forks
        assert any("tool_calls" in segment.messages[0] for segment in trajectory.segments)
        assert (trajectory.recorded, trajectory.stop_reason) == ("text", "completed")
        metrics = session.metrics()
        assert trajectory.metrics["completion_tokens"] == metrics["sampled_tokens"] == trajectory.sampled_tokens
        assert trajectory.metrics["prompt_tokens"] == metrics["prompt_tokens"]
        for name in ("turns", "branches", "forks"):
            assert trajectory.metrics[name] == metrics[name], name
        assert "turns_without_usage" not in trajectory.metrics
        assert trajectory.metrics["temperature"] == 0.5
        assert set(trajectory.turn_metrics) == {f"t{n}" for n in range(int(metrics["turns"]))}
        assert {metrics["max_tokens"] for metrics in trajectory.turn_metrics.values()} == {900}
        assert Trajectory.from_bytes(trajectory.to_bytes()).to_bytes() == trajectory.to_bytes()
        with pytest.raises(TrainError, match="front was recorded as text"):
            to_samples(trajectory)
