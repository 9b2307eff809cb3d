"""Demonstrations: reading them, and rendering them into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.errors import SessionError, TaskError
from turnwise.inference.scripted import replay
from turnwise.model.core import Renderer
from turnwise.tasks.sources import JsonlRows
from turnwise.trainer.core import TrainRow
from turnwise.trajectory import to_samples
from turnwise.types import Message, ToolSchema


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to learn from.

    Attributes:
        id: Its origin.
        messages: The conversation.
        tools: The available tools.
    """

    id: str
    messages: list[Message]
    tools: list[ToolSchema]


def load_demonstrations(path: Path, limit: int | None = None) -> list[Demonstration]:
    """Read a jsonl file of ``{"messages": [...], "tools": [...]}``.

    Raises:
        TaskError: The file cannot be read or is empty, or a row is malformed; the message names file, row and field.
    """
    rows = [_demonstration(row.where, row.value) for row in islice(JsonlRows(path).read(), limit)]
    if not rows:
        raise TaskError(f"{path} holds no demonstration")
    return rows


async def demonstration_rows(
    demonstrations: Sequence[Demonstration], renderer: Renderer, max_tokens: int | None = None
) -> tuple[list[list[TrainRow]], int]:
    """Replay each conversation through a session; only the assistant's tokens are trained.

    A conversation whose history the renderer cannot extend has several rows; each assistant token is trained in exactly
    one of them.

    Returns:
        The rows of each conversation, and the number of assistant tokens cut off by ``max_tokens``.

    Raises:
        TaskError: A conversation cannot be rendered in this chat format.
    """
    rows_by_demonstration: list[list[TrainRow]] = []
    cut = 0
    for demonstration in demonstrations:
        try:
            trajectory = await replay(
                demonstration.messages, demonstration.tools, renderer, trajectory_id=demonstration.id
            )
        except SessionError as error:
            raise TaskError(f"{demonstration.id}: {error}") from error
        samples = to_samples(trajectory, max_tokens=max_tokens)
        cut += samples.unowned_tokens
        rows_by_demonstration.append([TrainRow(sample) for sample in samples.rows])
    return rows_by_demonstration, cut


def _messages(where: str, value: Any) -> list[Message]:
    """Read a list of messages in OpenAI's format."""
    if not isinstance(value, list):
        raise TaskError(f"{where} is {value!r}; it must be a list of messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TaskError(f"{where}[{index}] is {message!r}; a message is an object with a role")
    return value


def _demonstration(where: str, record: Any) -> Demonstration:
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise TaskError(f"{where}: messages is missing; a row is an object with a list of messages")
    _check_fields(where, record, ("messages", "tools", "id"))
    messages = _messages(f"{where}: messages", record["messages"])
    return Demonstration(str(record.get("id", where)), messages, _tools(where, record))


def _check_fields(where: str, record: dict[str, Any], allowed: Sequence[str]) -> None:
    if unknown := sorted(set(record) - set(allowed)):
        raise TaskError(f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join(allowed)}")


def _tools(where: str, record: dict[str, Any]) -> list[ToolSchema]:
    """Read a row's tools in OpenAI's format."""
    return [_tool(f"{where}: tools[{index}]", tool) for index, tool in enumerate(record.get("tools") or ())]


def _tool(where: str, tool: Any) -> ToolSchema:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TaskError(f"{where} is {tool!r}; a tool is an object with function.name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSchema(function["name"], function.get("description") or "", parameters)
