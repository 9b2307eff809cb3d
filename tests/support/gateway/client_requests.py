"""The requests of real agent programs, written by hand: one conversation in one session, over any wire API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from support.gateway.server import Served, serving
from turnwise.inference.scripted import ScriptedRequest
from turnwise.types import ToolCall, ToolSchema

RUN = ToolSchema("run", "Runs a command.", {"type": "object", "properties": {"command": {}, "limit": {}}})
CHAT_TOOLS: list[Any] = [RUN.to_json()]
ITEM_TOOLS: list[Any] = [{"type": "function", "name": "run", "parameters": RUN.parameters, "strict": False}]
BLOCK_TOOLS: list[Any] = [{"name": "run", "description": "Runs a command.", "input_schema": RUN.parameters}]
DONE: Any = {"role": "assistant", "content": "Done."}


def says(text: str = "", *arguments: dict[str, Any], thinks: str = "") -> Any:
    """A line of a script: a turn that calls ``run`` with each of these arguments."""
    calls = [ToolCall("", "run", argument) for argument in arguments]
    return {"role": "assistant", "content": text, "reasoning_content": thinks, "tool_calls": calls}


def calls(name: str, **arguments: Any) -> Any:
    """A line of a script: a turn that calls another tool."""
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", name, arguments)]}


def user(content: Any) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": content}


def said(*blocks: Any) -> dict[str, Any]:
    """A turn as blocks."""
    return {"role": "assistant", "content": list(blocks)}


def results(*blocks: Any, text: Any = "ok") -> dict[str, Any]:
    """The results of the calls among some blocks, in one user message."""
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return user([{"type": "tool_result", "tool_use_id": block["id"], "content": text} for block in calls])


@dataclass
class Talk:
    """One session, asked by any API.

    Attributes:
        served: The gateway.
        opened: What it said when it opened the session.
    """

    served: Served
    opened: dict[str, Any]

    async def post(self, route: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        """Send a body; return the status and the answer."""
        url = f"{self.opened['path']}/v1/{route}"
        async with self.served.http.post(url, json={"model": "m", **body}, headers=headers) as answer:
            return answer.status, await answer.json()

    async def blocks(self, *messages: Any, **more: Any) -> list[Any]:
        """One turn of Anthropic Messages: its blocks."""
        body = {"max_tokens": 500, "tools": BLOCK_TOOLS, "messages": list(messages), **more}
        status, answer = await self.post("messages", body)
        assert status == 200, answer
        content: list[Any] = answer["content"]
        return content

    async def items(self, *items: Any, **more: Any) -> list[Any]:
        """One turn of Responses, as Codex asks for it: its items."""
        body = {"input": list(items), "tools": ITEM_TOOLS, "store": False, **more}
        status, answer = await self.post("responses", body, originator="codex_exec")
        assert status == 200, answer
        output: list[Any] = answer["output"]
        return output

    async def message(self, *messages: Any, **more: Any) -> dict[str, Any]:
        """One turn of Chat Completions: its message."""
        status, answer = await self.post("chat/completions", {"messages": list(messages), "tools": CHAT_TOOLS, **more})
        assert status == 200, answer
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    @property
    def shape(self) -> tuple[int, list[str]]:
        """How many branches there are, and the reason of each fork."""
        session = self.served.session(self.opened)
        forks = [segment.fork for segment in session.segments() if segment.fork and segment.kind == "context"]
        resamples = [segment.fork for segment in session.segments() if segment.fork == "resample"]
        return int(session.metrics()["branches"]), forks + resamples

    @property
    def metrics(self) -> dict[str, float]:
        """The session's counts."""
        return self.served.session(self.opened).metrics()

    @property
    def asked(self) -> list[ScriptedRequest]:
        """What the model was asked."""
        requests: list[ScriptedRequest] = self.served.client.requests  # type: ignore[attr-defined]
        return requests


LINEAR = (1, [])
"""The shape of a conversation that only grew."""


@contextlib.asynccontextmanager
async def talking(*lines: Any, tools: Sequence[ToolSchema] = (RUN,), **more: Any) -> AsyncIterator[Talk]:
    """Serve one session over a script, whose lines call these tools; what it leaves is audited."""
    script = list(lines) if len(lines) != 1 else (lambda _: lines[0])
    async with serving(script, tools=tools, **more) as served:
        yield Talk(served, await served.open())
