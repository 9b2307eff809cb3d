"""How the values of the walk are written: lines of text that fit a page."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from blocks import Block

from turnwise.model.canonical import Canonical
from turnwise.model.core import Renderer
from turnwise.types import Message, TokenIds, ToolCall

WIDTH = 110
COLUMNS = 19


class Page:
    """Collects blocks in order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, name: str, *lines: str, approximate: bool = False) -> None:
        """Add a block."""
        self.blocks.append(Block(name, "".join(f"{line.rstrip()}\n" for line in lines), approximate))


def fields(value: Any) -> list[str]:
    names = [each.name for each in dataclasses.fields(value)]
    width = max(map(len, names))
    return [f"{name:<{width}} {getattr(value, name)!r}" for name in names]


def own(message: Mapping[str, Any]) -> Message:
    """Return a message of a segment, which has the form that templates take, with its calls as ToolCalls."""
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else {**message}  # type: ignore[typeddict-item]


def shown_message(message: Message) -> str:
    calls = [f"{call.name}({json.dumps(call.arguments)})" for call in message.get("tool_calls", ())]
    return f"{message['role']}: {' '.join(calls) or message['content']}"


def shown_canonical(message: Canonical) -> str:
    text = f"Canonical(role={message.role!r}, text={message.text!r}"
    if message.calls:
        text += "".join(f", calls=[{call.name} {call.arguments}]" for call in message.calls)
    return text + (f", answers={message.answers})" if message.answers is not None else ")")


def pieces(renderer: Renderer, ids: TokenIds) -> list[str]:
    """Return ids with their texts, wrapped."""
    shown = [f"{number} {clipped(renderer.decode(ids[place : place + 1]))!r}" for place, number in enumerate(ids)]
    lines, line = [], ""
    for piece in shown:
        if line and len(line) + len(piece) + 3 > WIDTH:
            lines.append(line)
            line = ""
        line = f"{line} | {piece}" if line else piece
    return [*lines, line]


def clipped(text: str) -> str:
    """Return a long text with its middle left out."""
    return text if len(text) <= 40 else f"{text[:20]} ... {text[-14:]}"


def wrapped(name: str, values: Sequence[int]) -> list[str]:
    indent = " " * len(name)
    return textwrap.wrap(" ".join(map(str, values)), WIDTH, initial_indent=name, subsequent_indent=indent)


def decimals(values: Sequence[float] | np.ndarray, digits: int) -> str:
    return " ".join(f"{float(value):.{digits}f}" for value in values)


def columns(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return arrays of equal length one below the other, in parts that fit the page."""
    lines: list[str] = []
    length = len(next(iter(arrays.values())))
    for start in range(0, length, COLUMNS):
        if lines:
            lines.append("")
        for name, values in arrays.items():
            lines.append(f"{name:<16}" + "".join(f"{int(value):>5}" for value in values[start : start + COLUMNS]))
    return lines
