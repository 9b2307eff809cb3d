"""Removal of the key of a hosted endpoint from its event streams, also where texts quote it in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson

HIDDEN = "[key]"
_NUMBERS = ("index", "output_index", "content_index", "summary_index")
_CLOSING = (".done", "_stop")


@dataclass(eq=False, slots=True)
class _Line:
    raw: bytes
    event: Any = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a text: ``holder[name]`` in the event of a line."""

    line: _Line
    holder: Any
    name: Any

    @property
    def text(self) -> str:
        return str(self.holder[self.name])

    def replace(self, text: str) -> None:
        self.holder[self.name] = text
        _drop_logprobs(self.line.event)
        self.line.raw = b"data: " + orjson.dumps(self.line.event) + b"\n"


class SecretFilter:
    """Removes a key from an event stream, cut into chunks and text deltas anywhere; an empty one removes nothing.

    It returns complete lines. A line whose text ends in a beginning of the key waits, with all after it, until the text
    continues or is closed.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._beginnings = _beginnings(key)
        self._rest: list[bytes] = []
        self._waiting: list[_Line] = []
        # By choice, item or block: the pieces of its texts that end in a beginning of the key.
        self._open: dict[tuple[str, ...], dict[tuple[str, ...], list[_Piece]]] = {}

    def feed(self, data: bytes) -> bytes:
        """Return the filtered data; an incomplete line, and lines that may begin a key, wait."""
        *lines, rest = data.split(b"\n")
        if lines:
            # A line may have many pieces (an image): they are joined once.
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest.clear()
        self._rest.append(rest)
        return b"".join(self._filter(line + b"\n") for line in lines)

    def end(self) -> bytes:
        """Return the data that waits."""
        filtered = self._filter(b"".join(self._rest))
        return filtered + b"".join(line.raw for line in self._waiting)

    def _filter(self, raw: bytes) -> bytes:
        if not self._key:
            return raw
        raw = hide_key(raw, self._key)
        is_event = raw.startswith(b"data:")
        if not self._open and not (is_event and self._beginnings.search(raw)):
            return raw
        line = _Line(raw)
        self._waiting.append(line)
        if is_event:
            self._read(line)
        # Lines before the first that an open text needs are complete.
        opened = (pieces[0].line for texts in self._open.values() for pieces in texts.values())
        ready = min(map(self._waiting.index, opened), default=len(self._waiting))
        filtered = b"".join(line.raw for line in self._waiting[:ready])
        del self._waiting[:ready]
        return filtered

    def _read(self, line: _Line) -> None:
        try:
            line.event = orjson.loads(line.raw[5:])
            additions = [(part, list(_texts(part, "delta", ()))) for part in _parts(line.event)]
        except (orjson.JSONDecodeError, RecursionError):
            # No event of these APIs: the mark of the end, or nested too deeply.
            return
        for part, texts in additions:
            position = tuple(str(part.get(name)) for name in _NUMBERS)
            closed = part.get("finish_reason") or str(part.get("type")).endswith(_CLOSING)
            if not (texts or closed):
                continue
            # A choice that adds to one text closes its others: reasoning ends where content begins.
            before = self._open.pop(position, {})
            after = {
                place: pieces
                for place, holder, name in texts
                if (pieces := self._join([*before.get(place, ()), _Piece(line, holder, name)]))
            }
            if after and not closed:
                self._open[position] = after

    def _join(self, pieces: list[_Piece]) -> list[_Piece]:
        """Remove the key from a text; return the pieces in which another may begin."""
        key, text = self._key, "".join(piece.text for piece in pieces)
        if key in text:
            text = text.replace(key, HIDDEN)
            for piece in pieces:
                piece.replace(text if piece is pieces[-1] else "")
            pieces = pieces[-1:]
        begun = next((size for size in range(len(key) - 1, 0, -1) if text.endswith(key[:size])), 0)
        while pieces and sum(len(piece.text) for piece in pieces[1:]) >= begun:
            del pieces[0]
        return pieces


def hide_key(data: bytes, key: str) -> bytes:
    """Return a JSON text or the line of an event without a key, nor log-probabilities of tokens that spell it."""
    hidden = data.replace(key.encode(), HIDDEN.encode()) if key else data
    if hidden == data or b'"logprobs"' not in data:
        return hidden
    mark, end = (b"data: ", b"\n") if data.startswith(b"data:") else (b"", b"")
    try:
        value = orjson.loads(hidden[len(mark.strip()) :])
    except orjson.JSONDecodeError:
        return hidden
    _drop_logprobs(value)
    return mark + orjson.dumps(value) + end


def _drop_logprobs(value: Any) -> None:
    pending = [value]
    while pending:
        member = pending.pop()
        if isinstance(member, dict):
            if member.get("logprobs"):
                member["logprobs"] = [] if isinstance(member["logprobs"], list) else None
            pending += member.values()
        elif isinstance(member, list):
            pending += member


@cache
def _beginnings(key: str) -> re.Pattern[bytes]:
    """Return what finds a value that may end in a beginning of the key, so that few events are parsed."""
    beginnings = b"|".join(re.escape(key[:size].encode()) for size in range(len(key) - 1, 0, -1))
    # What is escaped must be parsed; a name of a member is no text.
    return re.compile(rb'(?:%s)"(?!\s*:)|\\[u/]' % beginnings)


def _parts(event: Any) -> Iterator[dict[str, Any]]:
    """Yield what an event adds to: choices of a chat, else one item or block, which may begin with a text."""
    choices = event.get("choices") if isinstance(event, dict) else None
    for part in choices if isinstance(choices, list) else (event,):
        if isinstance(part, dict):
            yield part if "delta" in part else {**part, "delta": part.get("content_block")}


def _texts(holder: Any, name: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield the texts that a delta adds to others: where to, and what holds them under which name."""
    value = holder[name] if isinstance(holder, list) else holder.get(name)
    if isinstance(value, str) and value:
        yield place, holder, name
    elif isinstance(value, dict):
        for member in value.keys() - {"type"}:
            yield from _texts(value, member, (*place, member))
    elif isinstance(value, list):
        for number, member in enumerate(value):
            index = member.get("index", number) if isinstance(member, dict) else number
            yield from _texts(value, number, (*place, str(index)))
