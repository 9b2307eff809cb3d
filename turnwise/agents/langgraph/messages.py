"""Conversion between LangChain's messages and ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import ToolCall as GraphCall
from langchain_core.messages.tool import invalid_tool_call, tool_call
from pydantic import BaseModel

from turnwise.errors import AgentError, shown
from turnwise.types import Message, Role, ToolCall, text_of

REASONING = "reasoning_content"
"""Where LangChain's messages keep reasoning: a key of ``additional_kwargs``."""
_THOUGHTS = {"reasoning": "reasoning", "thinking": "thinking"}
# Blocks that repeat the message's calls.
_CALL_BLOCKS = frozenset(("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"))
_CHAT_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
}


@dataclass(frozen=True, slots=True)
class IssuedCall:
    """A tool call as issued to a graph.

    Attributes:
        offered: Whether the tool was offered, or none were.
    """

    agent: str
    call: ToolCall
    message_id: str
    offered: bool = True

    def named(self, agent: str) -> str:
        """Return its id in a session: its own where it was made, else the graph's."""
        return self.call.id if agent == self.agent else graph_call_id(self.call.id, self.agent)


class IssuedTurns:
    """Turns by message id and calls by call id, as issued to a graph."""

    __slots__ = ("_streams", "calls", "turns")

    def __init__(self) -> None:
        self.turns: dict[str, tuple[str, Message]] = {}
        self.calls: dict[str, IssuedCall] = {}
        self._streams = 0

    def stream_id(self, session_id: str) -> str:
        """Return the id of a streamed message whose turn has no id yet."""
        self._streams += 1
        return f"{session_id}/s{self._streams}"

    def turn_of(self, message: BaseMessage) -> tuple[str, Message] | None:
        """Return the session and message of the turn that a message is, or whose call it answers."""
        call = self.calls.get(message.tool_call_id) if isinstance(message, ToolMessage) else None
        return self.turns.get((message.id if call is None else call.message_id) or "")

    def register_turn(
        self, message: Message, *, agent: str, message_id: str, offered: frozenset[str] | None
    ) -> tuple[list[GraphCall], list[InvalidToolCall]]:
        """Register a turn; return its calls as the graph sees them.

        Calls of tools that were not offered are invalid for a graph, like unparsable ones: the environment answers
        them.

        Args:
            message: The turn.
            agent: Its session.
            message_id: The id of its message.
            offered: Names of the tools that may be called; None where there were no tools.
        """
        self.turns[message_id] = (agent, message)
        usable: list[GraphCall] = []
        unusable: list[InvalidToolCall] = []
        for call in message.get("tool_calls") or ():
            graph_id = graph_call_id(call.id, agent)
            error = call.error
            offered_tool = offered is None or call.name in offered
            if error is None and not offered_tool:
                error = (
                    f"there is no tool {shown(call.name)}" if offered else "tool_choice is none: it was not executed"
                )
            self.calls[graph_id] = IssuedCall(agent, call, message_id, offered_tool)
            if error is None:
                usable.append(tool_call(name=call.name, args=call.arguments, id=graph_id))
            else:
                args = call.raw or json.dumps(call.arguments, ensure_ascii=False)
                unusable.append(invalid_tool_call(name=call.name, args=args, id=graph_id, error=error))
        return usable, unusable

    def session_calls(self, message: AIMessage, agent: str) -> list[ToolCall]:
        """Return a message's calls in their own form, in order."""
        calls = [self._session_call(call["id"], call["name"], call["args"], agent) for call in message.tool_calls]
        for invalid_call in message.invalid_tool_calls:
            issued_call = self.calls.get(invalid_call.get("id") or "")
            if issued_call is not None:
                calls.append(_call_in_session(issued_call, agent))
            else:
                error = invalid_call.get("error") or "it could not be parsed"
                calls.append(
                    ToolCall(
                        invalid_call.get("id") or "",
                        invalid_call.get("name") or "",
                        {},
                        invalid_call.get("args") or "",
                        error,
                    )
                )
        turn = self.turns.get(message.id or "")
        if turn is None or len(calls) < 2:
            return calls
        order = {call.id: index for index, call in enumerate(turn[1].get("tool_calls") or ())}
        return sorted(calls, key=lambda call: order.get(call.id, len(order)))

    def _session_call(self, call_id: str | None, name: str, arguments: dict[str, Any], agent: str) -> ToolCall:
        issued_call = self.calls.get(call_id or "")
        if issued_call is not None:
            call = _call_in_session(issued_call, agent)
            if (call.name, call.arguments) == (name, arguments):
                return call
            # A graph may have edited it; its id still identifies the call.
            call_id = call.id
        return ToolCall(call_id or "", name, arguments, json.dumps(arguments, ensure_ascii=False, default=str))


def graph_call_id(call_id: str, agent: str) -> str:
    """Return a call's id in a graph, unique across sessions."""
    return call_id if agent == "main" else f"{agent}/{call_id}"


def _call_in_session(issued_call: IssuedCall, agent: str) -> ToolCall:
    """Return a call as a session knows it; other sessions did not sample it."""
    return issued_call.call if issued_call.agent == agent else replace(issued_call.call, id=issued_call.named(agent))


def session_message(message: BaseMessage, issued: IssuedTurns, agent: str = "main") -> Message:
    """Convert a LangChain message.

    Args:
        message: Any but ``RemoveMessage``.
        issued: Turns and calls issued to the graph.
        agent: Session that receives it.
    """
    if isinstance(message, AIMessage):
        return _assistant_message(message, issued, agent)
    if isinstance(message, ToolMessage):
        call = issued.calls.get(message.tool_call_id)
        call_id = message.tool_call_id if call is None else call.named(agent)
        answer: Message = {"role": "tool", "tool_call_id": call_id, "content": _content(message.content)}
        if message.name:
            answer["name"] = message.name
        return answer
    if isinstance(message, FunctionMessage):
        return {"role": "tool", "name": message.name, "content": _content(message.content)}
    role: Role | None = None
    if isinstance(message, HumanMessage):
        role = "user"
    elif isinstance(message, SystemMessage):
        role = "system"
    elif isinstance(message, ChatMessage):
        role = _CHAT_ROLES.get(message.role)
    if role is None:
        kind = message.role if isinstance(message, ChatMessage) else message.type
        raise AgentError(f"a message of kind {shown(kind)} cannot be sent to a model: use system, human, ai or tool")
    converted: Message = {"role": role, "content": _content(message.content)}
    if message.name and role != "assistant":
        converted["name"] = message.name
    return converted


def _assistant_message(message: AIMessage, issued: IssuedTurns, agent: str) -> Message:
    content = message.content
    thoughts = str(message.additional_kwargs.get(REASONING) or "")
    if not isinstance(content, str):
        parts: list[str | dict[str, Any]] = []
        for block in content:
            kind = "text" if isinstance(block, str) else block.get("type", "text")
            if isinstance(block, dict) and kind in _THOUGHTS:
                thoughts = thoughts or str(block.get(_THOUGHTS[kind]) or "")
            elif kind not in _CALL_BLOCKS:
                parts.append(block)
        content = "".join(map(_text_of_block, parts)) if all(map(_is_text, parts)) else parts
    converted: Message = {"role": "assistant", "content": _content(content)}
    if message.tool_calls or message.invalid_tool_calls:
        converted["tool_calls"] = issued.session_calls(message, agent)
    if thoughts:
        converted["reasoning_content"] = thoughts
    return converted


def _is_text(block: str | dict[str, Any]) -> bool:
    return isinstance(block, str) or block.get("type", "text") == "text"


def _text_of_block(block: str | dict[str, Any]) -> str:
    return block if isinstance(block, str) else str(block.get("text", ""))


def _content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": block} if isinstance(block, str) else block for block in content]


def graph_message(message: Message, agent: str = "main") -> AnyMessage:
    """Convert an environment's message to LangChain's."""
    content: Any = message.get("content") or ""
    role, name = message["role"], message.get("name")
    if role == "tool":
        return ToolMessage(content, tool_call_id=graph_call_id(message.get("tool_call_id", ""), agent), name=name)
    if role == "user":
        return HumanMessage(content, name=name)
    if role in ("system", "developer"):
        return SystemMessage(content, name=name)
    calls = [
        tool_call(name=call.name, args=call.arguments, id=graph_call_id(call.id, agent))
        for call in message.get("tool_calls") or ()
    ]
    thoughts = message.get("reasoning_content")
    return AIMessage(content, tool_calls=calls, additional_kwargs={REASONING: thoughts} if thoughts else {})


def graph_messages(messages: Sequence[Message], agent: str = "main") -> list[AnyMessage]:
    """Convert an environment's messages to LangChain's."""
    return [graph_message(message, agent) for message in messages]


def text_of_value(value: Any) -> str:
    """Return a state value as text, JSON where it is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, BaseMessage):
        return text_of(cast("Mapping[str, Any]", {"content": value.content}))
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseMessage):
        return text_of_value(value)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)
