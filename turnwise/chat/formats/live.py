"""Incremental parsing of a turn while it is sampled: text and reasoning that no later id can change.

What is emitted of a kind is always a prefix of the format's final parse. Held back are beginnings of markers and stop
strings, trailing white space, incomplete characters, and an answer that a closing marker could still turn into
reasoning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.chat.tokens import Marks, Tokens
from turnwise.types import TokenIds

Kind = Literal["text", "reasoning"]
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class StreamedTurn:
    """A piece of a streamed turn; ``fresh``: it begins a message, on a new line after the last one of its kind."""

    kind: Kind
    text: str
    fresh: bool = False


class Live(ABC):
    """Incremental scan of a growing text."""

    __slots__ = ("_text", "marks", "position")

    def __init__(self, marks: Marks, prefix: str = "") -> None:
        self.marks = marks
        self.position = 0
        self._text = prefix

    def feed(self, more: str) -> list[StreamedTurn]:
        """Append text; return what is now certain, in order, with markers spelled out."""
        if not more:
            return []
        # Text behind the position is never read again.
        self.forget(self.position)
        self._text += more
        pieces: list[StreamedTurn] = []
        while (piece := self.step(self._text)) is not None:
            if piece.text:
                pieces.append(StreamedTurn(piece.kind, self.marks.plain(piece.text), piece.fresh))
        return pieces

    def forget(self, count: int) -> None:
        """Drop the first characters of the text."""
        self._text = self._text[count:]
        self.position -= count

    @abstractmethod
    def step(self, text: str) -> StreamedTurn | None:
        """Advance from ``position`` as far as is certain; None if nowhere."""


def partial_match_start(text: str, start: int, strings: Sequence[str]) -> int:
    """Return where a text, from ``start`` on, may begin one of the strings; else its end."""
    end = len(text)
    longest = max((len(string) for string in strings), default=1) - 1
    for at in range(max(start, end - longest), end):
        if any(len(string) > end - at and text.startswith(string[: end - at], at) for string in strings):
            return at
    return end


class LiveScan(Live):
    """Incremental scan for formats whose calls are blocks or the whole text.

    Args:
        marks: Markers of the format.
        reasoning: Opening and closing reasoning markers as they occur in the text; empty for none.
        openers: Markers that open a block.
        begins: Where calls may be the whole text: whether a text begins a call, None while undecided.
        opened: Whether reasoning is open at the start.
        settled: Whether reasoning was closed before, so that a closing marker means nothing.
        bare: Whether calls may be the whole text.
    """

    __slots__ = (
        "_bare",
        "_begins",
        "_begun",
        "_close",
        "_done",
        "_open",
        "_openers",
        "_searched",
        "_settled",
        "_thinking",
    )

    def __init__(
        self,
        marks: Marks,
        reasoning: tuple[str, str],
        openers: Sequence[str],
        begins: Callable[[str], bool | None],
        *,
        opened: bool,
        settled: bool,
        bare: bool,
    ) -> None:
        super().__init__(marks)
        self._open, self._close = reasoning
        self._openers = tuple(openers)
        self._begins = begins
        self._thinking = opened
        self._settled = settled or opened or not self._close
        self._bare = bare
        self._begun = not bare
        self._done = False
        self._searched = 0

    def forget(self, count: int) -> None:
        """Drop the first characters of the text."""
        super().forget(count)
        self._searched = max(self._searched - count, 0)

    def step(self, text: str) -> StreamedTurn | None:
        """Advance as far as is certain."""
        if self._done:
            self.position = len(text)
        if self.position >= len(text):
            return None
        return self._read_thought(text) if self._thinking else self._read_answer(text)

    def _read_thought(self, text: str) -> StreamedTurn | None:
        start = self.position
        close = text.find(self._close, start)
        if close >= 0:
            self._thinking = False
            return self._take(close, self._close, "reasoning")
        end = partial_match_start(text, start, (self._close,))
        return self._take(end, "", "reasoning") if end > start else None

    def _read_answer(self, text: str) -> StreamedTurn | None:
        # Blocks come first: in a format's own parse they win where two markers start at one position.
        markers = [marker for marker in (*self._openers, self._open, self._close) if marker]
        searched = max(self.position, self._searched)
        matches = [(at, marker) for marker in markers if (at := text.find(marker, searched)) >= 0]
        first, marker = min(matches, key=lambda match: match[0], default=(len(text), ""))
        certain = partial_match_start(text, searched, markers)
        if certain < first:
            first, marker = certain, ""
        if not self._begun and not self._begins_nothing(text[self.position : first]):
            return None
        if marker and marker in self._openers:
            self._done = True
            return self._take(first, marker, "text") if self._settled else None
        if marker == self._open and marker:
            self._thinking = self._settled = True
            return self._take(first, marker, "text")
        if marker:
            kind: Kind = "text" if self._settled else "reasoning"
            if not self._settled:
                # Text before the first marker may still be reasoning, so the answer has not begun.
                self._settled, self._begun = True, not self._bare
            return self._take(first, marker, kind)
        if not self._settled:
            # A closing marker without an opening one would make reasoning of all this.
            self._searched = first
            return None
        return self._take(first, "", "text") if first > self.position else None

    def _begins_nothing(self, text: str) -> bool:
        """Whether an answer that begins with a text is not a call."""
        begin = text.lstrip()
        if not begin:
            return True
        call = self._begins(begin)
        self._done = call is True
        self._begun = call is False
        return self._begun

    def _take(self, end: int, marker: str, kind: Kind) -> StreamedTurn:
        start, self.position = self.position, end + len(marker)
        return StreamedTurn(kind, self._text[start:end])


class LiveTurn:
    """Incremental parser of the ids of one turn.

    Args:
        tokens: The tokenizer.
        live: The scan of the turn's text.
        stop_ids: Ids that end a turn.
        stops: Stop strings of the request: text ends before the first of them.
        reasoning_tokens: Returns how many ids of a whole completion are reasoning, without its markers.
    """

    __slots__ = ("_ended", "_kinds", "_live", "_read", "_run", "_stop_ids", "_stops", "_tokens", "reasoning_tokens")

    def __init__(
        self,
        tokens: Tokens,
        live: Live,
        stop_ids: frozenset[int],
        stops: Sequence[str] = (),
        reasoning_tokens: Callable[[TokenIds], int] = lambda _: 0,
    ) -> None:
        self.reasoning_tokens = reasoning_tokens
        self._tokens = tokens
        self._live = live
        self._stop_ids = stop_ids
        self._stops = tuple(stops)
        self._ended = False
        self._run: list[int] = []
        self._read = 0
        self._kinds = {"text": _KindStream(), "reasoning": _KindStream()}

    def feed(self, token_ids: Sequence[int]) -> list[StreamedTurn]:
        """Return what further ids make certain, merging neighbours of one kind."""
        turns: list[StreamedTurn] = []
        for piece in self._live.feed("".join(self._texts(token_ids))):
            text = self._kinds[piece.kind].more(piece, self._stops if piece.kind == "text" else ())
            if text and turns and turns[-1].kind == piece.kind:
                turns[-1] = StreamedTurn(piece.kind, turns[-1].text + text)
            elif text:
                turns.append(StreamedTurn(piece.kind, text))
        return turns

    def _texts(self, token_ids: Sequence[int]) -> Iterator[str]:
        marks = self._live.marks
        for number in token_ids:
            if self._ended:
                return
            if number in self._stop_ids:
                # How a format reads its end is decided by the parse of the whole turn.
                self._ended = True
                yield self._new_text(flush=True)
            elif marks.holds(number):
                yield self._new_text(flush=True)
                yield marks.read(self._tokens, [number])
                self._run, self._read = [], 0
            else:
                self._run.append(number)
        if not self._ended:
            yield self._new_text()

    def _new_text(self, *, flush: bool = False) -> str:
        """Return the text that the newest ids add, decoding only what affects it (``flush``: half characters, too)."""
        if self._read == len(self._run):
            return ""
        old_text = self._tokens.decode_behind(self._run[: self._read])
        now = self._tokens.decode_behind(self._run)
        if not flush and (now.endswith(_BROKEN) or not now.startswith(old_text)):
            return ""
        del self._run[: self._read]
        self._read = len(self._run)
        return now[len(old_text) :]


class _KindStream:
    """The emitted and the held-back text of one kind."""

    __slots__ = ("_begins", "_emitted", "_ended", "_held")

    def __init__(self) -> None:
        self._begins = True
        self._ended = False
        self._held = ""
        self._emitted = False

    def more(self, piece: StreamedTurn, stops: Sequence[str]) -> str:
        if self._ended:
            return ""
        text = piece.text
        if piece.fresh:
            self._held, self._begins = self._held.rstrip(), True
        if self._begins:
            text = text.lstrip()
            if not text:
                return ""
            self._begins = False
            if self._emitted or self._held:
                text = "\n" + text
        text = self._held + text
        stop_starts = [at for stop in stops if (at := text.find(stop)) >= 0]
        self._ended = bool(stop_starts)
        certain = text[: min(stop_starts) if stop_starts else partial_match_start(text, 0, stops)].rstrip()
        self._held = text[len(certain) :]
        self._emitted = self._emitted or bool(certain)
        return certain
