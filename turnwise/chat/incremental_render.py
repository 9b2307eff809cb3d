"""Incremental rendering: the template's suffix after a sampled turn, without rendering the conversation.

Proven once per shape (roles and call counts of the new messages, calls of the last turn, tools):

(a) the text after the sentinel is the same after a short and a long history, with and without tools;
(b) the new messages do not change what the template writes before the turn;
(c) every new content is in that text, in order, and so is one marker for each image;
(d) the sentinel occurs once in the render;
(e) the text starts with an added token, or encodes the same after other text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.formats.derive import common_start
from turnwise.chat.template import USER, TemplateFacts, Wire, wire_call
from turnwise.chat.tokens import Tokens, alternatives
from turnwise.errors import RenderError
from turnwise.model.canonical import Canonical

SENTINEL = "qzsentinelzq"
_TEXT, _IMAGE = "t", "i"
_BEFORE = ("x", "x.", "x\n", "x ", '"}')
_CACHE_LIMIT = 4096

Kind = tuple[str, str, bool, bool, int]
"""Role, parts (a letter for each text and image), whether there is a name, reasoning, and how many calls."""
Shape = tuple[tuple[Kind, ...], int, int]
"""Kinds of the new messages, calls of the last turn, and which tools."""
JsonTools = Sequence[Mapping[str, Any]]


class CannotExtend(Exception):
    """A turn cannot be extended; ``args[0]`` is the fork reason."""


@dataclass(frozen=True, slots=True)
class Delta:
    """How a shape is rendered; ``lead`` counts the characters before the close, needed by turns that were cut.

    Attributes:
        called: Whether the sentinel is in the last call's arguments, else in the text.
        tools: Whether the skeleton holds the tools.
        closes: Whether the turn has its own close, in place of which a stop token is sampled.
    """

    called: bool
    tools: bool
    closes: bool
    lead: int


def kind_of(message: Canonical) -> Kind:
    """Return the part of a message that its shape depends on."""
    parts = "".join(_TEXT if isinstance(part, str) else _IMAGE for part in message.parts())
    return (message.role, parts, bool(message.name), bool(message.reasoning), len(message.calls))


class TurnSuffix:
    """Renders skeletons and proves shapes, each shape once.

    Args:
        facts: The probed template.
        tokens: The tokenizer.
        stops: The added tokens that end a turn.
        marker: What the template writes for an image; None for a model of text only.
    """

    def __init__(self, facts: TemplateFacts, tokens: Tokens, stops: Sequence[str], marker: str | None = None) -> None:
        self._facts = facts
        self._tokens = tokens
        self._marker = marker
        self._stops = alternatives(stops)
        self._proofs: dict[Shape, Delta | str] = {}

    def tail(
        self, calls: Sequence[tuple[str, str]], new: Sequence[Wire], tools: JsonTools, shape: Shape
    ) -> tuple[str, Delta]:
        """Return the text that follows the turn, and how it was rendered.

        Raises :class:`CannotExtend` if the shape is not proven or the template raised on these messages.

        Args:
            calls: Name and id of each call of the turn.
            new: The new messages in the template's form.
            tools: The tools as JSON.
            shape: Shape of these arguments; ``shape[2]`` numbers the tools.
        """
        proof = self._proofs.get(shape)
        if proof is None:
            if len(self._proofs) >= _CACHE_LIMIT:
                self._proofs.clear()
            proof = self._proofs[shape] = self._prove(shape, tools)
        if isinstance(proof, str):
            raise CannotExtend(proof)
        text = self._render([USER, self._turn(calls, called=proof.called), *new], tools if proof.tools else None)
        return self._behind(text, called=proof.called), proof

    def forget(self) -> None:
        """Drop all proofs."""
        self._proofs.clear()

    def _render(self, messages: Sequence[Wire], tools: JsonTools | None, *, generate: bool = True) -> str:
        try:
            return self._facts.template.render(messages, tools, generate=generate)
        except RenderError as error:
            raise CannotExtend(f"template_error: {error}") from error

    def _turn(self, calls: Sequence[tuple[str, str]], *, called: bool) -> Wire:
        if not called:
            return {"role": "assistant", "content": SENTINEL}
        last_index = len(calls) - 1
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                wire_call(name, self._facts.arguments({"a": SENTINEL if number == last_index else "b"}), call_id)
                for number, (name, call_id) in enumerate(calls)
            ],
        }

    def _behind(self, text: str, *, called: bool) -> str:
        """Return the text after the sentinel; in a call, from the close of the turn on."""
        at = text.find(SENTINEL)
        if at < 0:
            raise CannotExtend("message_dropped")
        at += len(SENTINEL)
        if not called:
            return text[at:]
        stop = self._stops.search(text, at) if self._stops else None
        if stop is None:
            raise CannotExtend("no_bridge")
        return text[stop.start() :]

    def _prove(self, shape: Shape, tools: JsonTools) -> Delta | str:
        """Return how the shape is rendered, or why it cannot be."""
        why = ""
        for called in (True, False) if shape[1] else (False,):
            for with_tools in (False, True) if tools else (False,):
                try:
                    return self._check(shape, tools, called=called, with_tools=with_tools)
                except CannotExtend as declined:
                    why = why or str(declined.args[0])
        return why

    def _check(self, shape: Shape, tools: JsonTools, *, called: bool, with_tools: bool) -> Delta:
        calls = [(f"qzf{number}", self._call_id(number)) for number in range(shape[1])]
        turn = self._turn(calls, called=called)
        new, words = self._examples(shape[0], calls)
        tails = []
        for history, own_tools in self._histories(tools if with_tools else None, tools):
            head = common_start(self._render(history, own_tools), self._render(history, own_tools, generate=False))
            text = self._render([*history, turn, *new], own_tools)
            if not text.startswith(head):
                raise CannotExtend("depends_on_history")
            if text.count(SENTINEL) > 1:
                raise CannotExtend("no_bridge")
            tails.append(self._behind(text, called=called))
        if any(tail != tails[0] for tail in tails):
            raise CannotExtend("depends_on_history")
        self._complete(tails[0], words)
        self._separable(tails[0])
        return self._closed(turn, tails[0], called, tools if with_tools else None)

    def _call_id(self, number: int) -> str:
        return f"qzcall00{number % 10}" if self._facts.short_ids else f"functions.qzf{number}:{number}"

    def _histories(
        self, short_tools: JsonTools | None, tools: JsonTools
    ) -> Iterator[tuple[list[Wire], JsonTools | None]]:
        """Yield a short history and the longest that the template accepts, each with its tools."""
        yield [USER], short_tools
        if self._marker is not None:
            # A template may count images, and write their numbers.
            yield (
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": USER["content"]}]}],
                short_tools,
            )
        system: Wire = {"role": "system", "content": "qzsystem"}
        answer_message: Wire = {"role": "assistant", "content": "qzreply"}
        call = {"role": "assistant", "content": "", "tool_calls": self._facts.assistant(calls=1)["tool_calls"]}
        answer = {"role": "tool", "content": "qzresult", "tool_call_id": self._facts.ids[0], "name": "qzfirst"}
        exchange: list[Wire] = [USER, call, answer, answer_message, USER]
        longer: list[list[Wire]] = [
            [system, *exchange],
            exchange,
            [system, USER, answer_message, USER],
            [USER, answer_message, USER],
        ]
        accepted = 0
        for history in longer:
            try:
                self._render(history, tools or None)
                self._render([*history, answer_message, USER], tools or None)
            except CannotExtend:
                continue
            accepted += 1
            yield history, tools or None
            if accepted == 2:
                return
        if accepted == 0:
            raise CannotExtend("depends_on_history")

    def _examples(self, kinds: Sequence[Kind], calls: Sequence[tuple[str, str]]) -> tuple[list[Wire], list[list[str]]]:
        """Return messages of these kinds, and the words of each that must be rendered."""
        new: list[Wire] = []
        words: list[list[str]] = []
        answered = 0
        open_calls = list(calls)
        for number, (role, parts, name, reasoning, count) in enumerate(kinds):
            texts = [f"qzc{number}p{at}q" if part == _TEXT else self._marker or "" for at, part in enumerate(parts)]
            content: Any = "".join(texts)
            if _IMAGE in parts:
                content = [
                    {"type": "text", "text": text} if part == _TEXT else {"type": "image"}
                    for part, text in zip(parts, texts, strict=True)
                ]
            message: Wire = {"role": role, "content": content}
            if name:
                message["name"] = f"qzn{number}"
            if reasoning:
                message["reasoning_content"] = message["thinking"] = f"qzr{number}"
            if role == "tool":
                called, call_id = open_calls[answered % len(open_calls)] if open_calls else ("qznone", "qzcall000")
                message |= {"tool_call_id": call_id, "name": called}
                answered += 1
            if count:
                open_calls = [(f"qzf{number}x{n}", self._call_id(n)) for n in range(count)]
                answered = 0
                message["tool_calls"] = [
                    wire_call(called, self._facts.arguments({"qzk": f"qzv{number}x{n}"}), call_id)
                    for n, (called, call_id) in enumerate(open_calls)
                ]
            new.append(message)
            values = [f"qzv{number}x{n}" for n in range(count)]
            words.append([*texts, *values])
        return new, words

    def _complete(self, tail: str, words: Sequence[Sequence[str]]) -> None:
        """Check (c): nothing is dropped, and messages keep their order."""
        reached = 0
        marker = self._marker or ""
        for message in words:
            positions = [tail.find(word) for word in message if word != marker]
            if any(position < 0 for position in positions):
                raise CannotExtend("message_dropped")
            if positions and min(positions) < reached:
                raise CannotExtend("depends_on_history")
            reached = max([reached, *positions])
        if not marker:
            return
        if tail.count(marker) != sum(message.count(marker) for message in words):
            raise CannotExtend("message_dropped")
        reached = 0
        for word in (word for message in words if marker in message for word in message):
            reached = tail.find(word, reached) + len(word)
            if reached < len(word):
                raise CannotExtend("depends_on_history")

    def _separable(self, tail: str) -> None:
        token_ids = self._tokens.encode(tail)
        if token_ids and self._tokens.is_added(token_ids[0]):
            return
        for prefix in _BEFORE:
            if self._tokens.encode(prefix + tail) != self._tokens.encode(prefix) + token_ids:
                raise CannotExtend("no_bridge")

    def _closed(self, turn: Wire, tail: str, called: bool, tools: JsonTools | None) -> Delta:
        """Find out whether the turn has its own close, whatever follows.

        The template then also writes one at the end of a conversation, perhaps another token (as gpt-oss does).
        """
        none = Delta(called, tools is not None, closes=False, lead=0)
        try:
            ending = self._behind(self._render([USER, turn], tools, generate=False), called=called)
        except CannotExtend:
            return none
        if self._tokens.first_added(tail.lstrip()) is not None:
            closes = self._tokens.first_added(ending.lstrip()) is not None
            return Delta(called, tools is not None, closes, len(tail) - len(tail.lstrip()) if closes else 0)
        stop = self._stops.search(tail) if self._stops else None
        if stop is None or self._stops is None or self._stops.search(ending) is None:
            return none
        return Delta(called, tools is not None, closes=True, lead=stop.start())
