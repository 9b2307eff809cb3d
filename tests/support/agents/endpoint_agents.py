"""Agent loops over an OpenAI- or Anthropic-compatible endpoint, with their tools, and the runner that plays them.

Each speaks one wire API until a turn makes no call. They send what real programs send and a session does not: a
temperature and a seed of their own, results in another order, turns dumped by the client's own classes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

from turnwise.types import Message, ToolCall, ToolSchema

Answer = Callable[[ToolCall], Awaitable[str]]
"""Runs a call, as the agent was told of it, and returns what its tool says."""


@dataclass(frozen=True)
class Wire:
    """One way to talk to a model.

    Attributes:
        talk: The loop: base URL, first messages, tools, who runs calls, whether answers are streamed.
        stream: Whether they are.
    """

    talk: Callable[[str, Sequence[Message], Sequence[ToolSchema], Answer, bool], Awaitable[None]]
    stream: bool


def read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Return a call as an agent reads it; arguments that are not a JSON object are none."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return ToolCall(call_id, name, value if isinstance(value, dict) else {}, arguments)


async def talk_chat(
    base: str, observation: Sequence[Message], tools: Sequence[ToolSchema], answer: Answer, stream: bool
) -> None:
    """OpenAI Chat Completions."""
    messages: list[Any] = list(observation)
    offered: Any = [tool.to_json() for tool in tools]
    async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="any", max_retries=0) as client:
        while True:
            request: dict[str, Any] = {"model": "m", "messages": messages, "tools": offered, "temperature": 0.1}
            if stream:
                message = await _streamed_chat(client, request)
            else:
                completion = await client.chat.completions.create(**request, seed=5)
                message = completion.choices[0].message.model_dump(exclude_none=True)
            messages.append(message)
            calls = message.get("tool_calls") or ()
            if not calls:
                return
            for call in calls:
                tool_call = read_call(call["id"], call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": await answer(tool_call)})


async def _streamed_chat(client: openai.AsyncOpenAI, request: dict[str, Any]) -> dict[str, Any]:
    """Put a streamed message together, as programs do that do not take a cut answer for an error."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    async for chunk in await client.chat.completions.create(**request, seed=5, stream=True):
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            thought = (delta.model_extra or {}).get("reasoning_content")
            if thought:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            for call in delta.tool_calls or ():
                calls = message.setdefault("tool_calls", [])
                if call.index == len(calls):
                    calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
                assert call.function is not None
                calls[call.index]["function"]["name"] += call.function.name or ""
                calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    return message


def _function(tool: ToolSchema) -> dict[str, Any]:
    return {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}


async def talk_responses(
    base: str, observation: Sequence[Message], tools: Sequence[ToolSchema], answer: Answer, stream: bool
) -> None:
    """OpenAI Responses: whole ones each upon the response before it, streamed ones with all items, as Codex does."""
    items: Any = [{"role": m["role"], "content": m["content"]} for m in observation]
    previous_id: Any = openai.omit
    async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="any", max_retries=0) as client:
        while True:
            request: dict[str, Any] = {"model": "m", "input": items, "tools": [_function(tool) for tool in tools]}
            if stream:
                output = [
                    event.item
                    async for event in await client.responses.create(**request, store=False, stream=True)
                    if event.type == "response.output_item.done"
                ]
            else:
                response = await client.responses.create(**request, previous_response_id=previous_id)
                output, previous_id, items = response.output, response.id, []
            results: list[Any] = []
            for item in output:
                if item.type == "function_call":
                    text = await answer(read_call(item.call_id, item.name, item.arguments))
                    results.append({"type": "function_call_output", "call_id": item.call_id, "output": text})
            if not results:
                return
            items = [*items, *(item.model_dump(exclude_none=True) for item in output if stream), *results]


async def talk_messages(
    base: str, observation: Sequence[Message], tools: Sequence[ToolSchema], answer: Answer, stream: bool
) -> None:
    """Anthropic Messages; the results come back in one user message, the last one first."""
    messages: Any = list(observation)
    offered: Any = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in tools]
    async with anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as client:
        while True:
            request: dict[str, Any] = {"model": "m", "max_tokens": 4000, "messages": messages, "tools": offered}
            if stream:
                async with client.messages.stream(**request) as events:
                    reply_message = await events.get_final_message()
            else:
                reply_message = await client.messages.create(**request, extra_body={"temperature": 0.3})
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply_message.content]})
            results: list[Any] = []
            for block in reply_message.content:
                if block.type == "tool_use":
                    text = await answer(read_call(block.id, block.name, json.dumps(block.input)))
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": text})
            if not results:
                return
            messages.append({"role": "user", "content": results[::-1]})


WIRES = {
    f"{name}-{'stream' if stream else 'whole'}": Wire(talk, stream)
    for name, talk in (("chat", talk_chat), ("responses", talk_responses), ("messages", talk_messages))
    for stream in (False, True)
}
"""All ways to ask: three APIs, streamed and not."""
