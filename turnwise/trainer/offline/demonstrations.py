"""Written conversations, and the rows that a rollout of them would have left.

Owns: :class:`Demonstration`, :func:`load_demonstrations` and :func:`demonstration_rows` (a session replayed by a
script, so that rows hold exactly the ids that a rollout would). Refuses: training on them (``sft.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import SessionError, TaskError
from turnwise.inference.core import Renderer
from turnwise.inference.scripted import replay
from turnwise.trainer.offline.core import json_lines
from turnwise.trainer.packing import TrainRow
from turnwise.trajectory import to_samples
from turnwise.types import Message, ToolSchema


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to learn from.

    Attributes:
        id: Where it came from.
        messages: What was said.
        tools: What could be called.
    """

    id: str
    messages: list[Message]
    tools: list[ToolSchema]


def load_demonstrations(path: Path, limit: int | None = None) -> list[Demonstration]:
    """Read a jsonl file of ``{"messages": [...], "tools": [...]}``.

    Raises:
        TaskError: The file cannot be read or holds nothing, or a row is malformed; the message names file, row and
            field.
    """
    rows = [_demonstration(where, record) for where, record in json_lines(path, limit)]
    if not rows:
        raise TaskError(f"{path} holds no demonstration")
    return rows


async def demonstration_rows(
    demonstrations: Sequence[Demonstration], renderer: Renderer, max_tokens: int | None = None
) -> tuple[list[list[TrainRow]], int]:
    """Replay each conversation through a session.

    The assistant's tokens are trained, everything else is context. A conversation whose history the renderer cannot
    extend has several rows; each assistant token is trained in exactly one of them.

    Returns:
        The rows of each conversation, and how many assistant tokens ``max_tokens`` cut off.

    Raises:
        TaskError: A conversation cannot be said in this chat format.
    """
    found: list[list[TrainRow]] = []
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
        found.append([TrainRow(sample) for sample in samples.rows])
    return found, cut


def read_messages(where: str, given: Any) -> list[Message]:
    """Check a list of messages in OpenAI's form.

    Raises:
        TaskError: It is none.
    """
    if not isinstance(given, list):
        raise TaskError(f"{where} is {given!r}; it must be a list of messages")
    for index, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TaskError(f"{where}[{index}] is {message!r}; a message is an object with a role")
    return given


def read_tools(where: str, given: Any) -> list[ToolSchema]:
    """Check a list of tools in OpenAI's form.

    Raises:
        TaskError: A tool has no name.
    """
    return [_tool(f"{where}: tools[{index}]", tool) for index, tool in enumerate(given or ())]


def _demonstration(where: str, record: Any) -> Demonstration:
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise TaskError(f"{where}: messages is missing; a row is an object with a list of messages")
    if unknown := sorted(set(record) - {"messages", "tools", "id"}):
        raise TaskError(f"{where}: unknown field {unknown[0]!r}; allowed: messages, tools, id")
    messages = read_messages(f"{where}: messages", record["messages"])
    return Demonstration(str(record.get("id", where)), messages, read_tools(where, record.get("tools")))


def _tool(where: str, tool: Any) -> ToolSchema:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TaskError(f"{where} is {tool!r}; a tool is an object with function.name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSchema(function["name"], function.get("description") or "", parameters)
