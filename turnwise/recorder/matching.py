"""Message matching: whether a message of a request is one that the session recorded."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

from turnwise.model.canonical import Canonical, TemplateArguments

ToolsKey = tuple[tuple[str, str, str], ...]
RootKey = tuple[ToolsKey, TemplateArguments]
"""What a root's requests share: tools and template arguments."""

EchoPolicy = Literal["same", "strict"]
"""How an assistant message with the call ids of a turn but other content is treated: ``same``, as that turn;
``strict``, as edited."""
ReasoningPolicy = Literal["keep", "template"]
"""How the reasoning of earlier turns is treated: ``keep``, what was sampled stays; ``template``, what the model's
template drops from a history is dropped, which forks."""


def same_message(recorded: Canonical, message: Canonical, *, sampled: bool) -> bool:
    """Return whether a request's message matches a recorded (and perhaps sampled) one.

    White space around an assistant's text or reasoning is ignored; sampled reasoning may be missing.
    """
    if recorded is message:
        return True
    if recorded.role != "assistant" or message.role != "assistant":
        return recorded == message
    if sampled and message.turn is not None:
        return message.turn == recorded.turn
    if recorded.calls != message.calls or recorded.text.strip() != message.text.strip():
        return False
    reasoning = message.reasoning.strip()
    return reasoning == recorded.reasoning.strip() or (sampled and not reasoning)


def same_context(recorded: Sequence[Canonical], messages: Sequence[Canonical]) -> bool:
    """Return whether messages match those of a context."""
    pairs = zip(recorded, messages, strict=False)
    return len(recorded) == len(messages) and all(same_message(*pair, sampled=False) for pair in pairs)


class MessageMatcher(Container[str]):
    """Index of a session's turns by call id; ``strict``: messages must match in content, too.

    ``rewritten`` holds the ids of turns that came back with changed content.
    """

    __slots__ = ("_changes", "_foreign", "_issued", "_strict", "_turns", "rewritten")

    def __init__(self, *, strict: bool = False) -> None:
        self.rewritten: set[str] = set()
        self._changes: tuple[list[str], list[str]] = [], []
        self._strict = strict
        self._issued: dict[str, str] = {}
        self._turns: dict[str, Canonical] = {}
        self._foreign: set[str] = set()

    def __contains__(self, call_id: object) -> bool:
        """Whether a call id is taken, by a turn or by the agent."""
        return call_id in self._issued or call_id in self._foreign

    def register(self, turn_id: str, message: Canonical) -> None:
        """Register a turn returned to the agent."""
        if message.calls:
            self._turns[turn_id] = message
            self._issued.update((call.id, turn_id) for call in message.calls)

    def turn_of(self, call_id: str) -> str | None:
        """Return the id of the turn that issued a call id, or None."""
        return self._issued.get(call_id)

    def count_sibling_calls(self, call_id: str) -> int:
        """Return the number of calls of the turn that issued a call id; 0 for unknown ids."""
        turn = self._turns.get(self._issued.get(call_id, ""))
        return 0 if turn is None else len(turn.calls)

    def recognise(self, ids: Sequence[str], message: Canonical) -> Canonical | None:
        """Return the recorded turn whose calls have exactly these ids, or None."""
        if not ids:
            return None
        for call_id in ids:
            if call_id and call_id not in self._issued and call_id not in self._foreign:
                self._foreign.add(call_id)
                self._changes[1].append(call_id)
        turn = self._turns.get(self._issued.get(ids[0], ""))
        if turn is None or turn.turn is None or sorted(ids) != sorted(call.id for call in turn.calls):
            return None
        if not same_message(turn, message, sampled=True):
            if self._strict:
                return None
            if turn.turn not in self.rewritten:
                self.rewritten.add(turn.turn)
                self._changes[0].append(turn.turn)
        return turn

    def take_changes(self) -> tuple[list[str], list[str]]:
        """Return the turns found rewritten and call ids that the agent made up, since the last time."""
        rewritten, foreign = (turn_or_call_ids[:] for turn_or_call_ids in self._changes)
        # Messages may be canonicalized in a thread meanwhile: what that adds stays for the next time.
        del self._changes[0][: len(rewritten)], self._changes[1][: len(foreign)]
        return rewritten, foreign

    def restore(self, rewritten: Sequence[str], foreign: Sequence[str]) -> None:
        """Add what :meth:`take_changes` returned in an earlier process."""
        self.rewritten.update(rewritten)
        self._foreign.update(foreign)
