"""Forks of sessions: the turns that a fork gives again, and the search for the one that a request asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from turnwise.errors import SessionError
from turnwise.model.canonical import Canonical
from turnwise.recorder.history import snapshot
from turnwise.recorder.matching import RootKey, same
from turnwise.recorder.requests import RecordedTurn
from turnwise.recorder.tree import NO_IDS, Node, PromptPlacement, joined, path_tokens
from turnwise.types import Completion, Message, TokenIds


class RequestGate(Protocol):
    """What a request passes before it samples: the place where a forked episode goes on from its fork."""

    def repeated(self) -> None:
        """Note that a turn before the fork was given again."""

    async def passes(self, *, first: bool) -> None:
        """Wait until a request may sample; what this raises the request raises.

        Args:
            first: Whether it is the request of the turn that the fork samples again.
        """


@dataclass(slots=True)
class Prefix:
    """The turns before a fork.

    A forked session answers the requests of these turns with what was sampled. Every other request samples: the one of
    ``again`` first.

    Attributes:
        session_id: For error messages.
        said: Messages of turns as they were returned, by turn id.
        left: The turns that were not asked for yet, in commit order.
        again: The turn that the first request samples again, until it does; None where that may be any request.
    """

    session_id: str
    said: Mapping[str, Message]
    left: list[Node] = field(default_factory=list)
    again: Node | None = None

    @property
    def over(self) -> bool:
        """Whether no request is any more one of the original."""
        return not self.left and self.again is None

    async def given(self, asks: Callable[[Node], bool], gate: RequestGate | None, asked: str) -> RecordedTurn | None:
        """Return the turn before the fork that answers a request; None for one that samples, once it may.

        Args:
            asks: Whether a turn answered this request.
            gate: Of the session.
            asked: The request, for error messages.

        Raises:
            SessionError: Turns before the fork are left, none of which answered this request, and there is no gate to
                wait at.
        """
        turn = next(filter(asks, self.left), None)
        if turn is not None:
            self.left.remove(turn)
            if gate is not None:
                gate.repeated()
            return self._taken(turn)
        first = self.again is not None and asks(self.again)
        if gate is not None:
            await gate.passes(first=first)
        elif self.left or not (first or self.again is None):
            raise SessionError(
                f"session {self.session_id}: the agent asks for something else than in the episode that was forked "
                f"({asked}; {len(self.left)} turns before the fork are left): an agent that is forked must repeat "
                "itself when it sees the same answers"
            )
        if first:
            self.again = None
        return None

    def _taken(self, turn: Node) -> RecordedTurn:
        assert turn.parent is not None
        assert turn.completion is not None
        sampled = turn.completion
        completion = Completion(turn.token_ids, sampled.logprobs, sampled.finish_reason, sampled.weight_versions)
        prompt = path_tokens(turn.parent)
        placement = PromptPlacement(prompt, prompt, turn.parent.token_ids)
        return RecordedTurn(placement, completion, snapshot(self.said[turn.turn_id or ""]))


def visible(
    found: tuple[list[tuple[Node, int]], Node | None], before: Collection[str] | None, sampled: Collection[str]
) -> tuple[list[tuple[Node, int]], Node | None]:
    """Return what a request was found to extend, without what other forks of the session sampled.

    Two forks may have sampled equal messages, and not every agent says which of them it means.

    Args:
        found: Turns with the number of messages up to them, and a context of all messages; see ``Tree.deepest``.
        before: Ids of the turns before the session's fork; None where nothing was forked.
        sampled: Ids of its own turns.
    """
    if before is None:
        return found
    turns = {*before, *sampled}

    def own(node: Node) -> bool:
        return all(each.turn_id in turns for each in node.path() if each.sampled)

    places, context = found
    return [place for place in places if own(place[0])], context if context is not None and own(context) else None


def asked_ids(turn: Node, prompt: TokenIds) -> bool:
    """Return whether a turn answered a prompt of exactly these ids."""
    return np.array_equal(joined(turn.parent, NO_IDS), prompt)


def asked_messages(turn: Node, messages: Sequence[Canonical], key: RootKey) -> bool:
    """Return whether a turn answered a request of exactly these messages, under the same root key."""
    return turn.key == key and _asked(turn, messages)


def _asked(turn: Node, messages: Sequence[Canonical]) -> bool:
    """Whether a request has exactly the messages that a turn answered; empty turns may be missing."""
    pending = [(turn.parent.path() if turn.parent is not None else [], 0)]
    while pending:
        nodes, at = pending.pop()
        if not nodes:
            if at == len(messages):
                return True
            continue
        node, rest = nodes[0], nodes[1:]
        if node.may_be_missing:
            pending.append((rest, at))
        end = at + len(node.messages)
        pairs = zip(node.messages, messages[at:end], strict=False)
        if end <= len(messages) and all(same(mine, theirs, sampled=node.sampled) for mine, theirs in pairs):
            pending.append((rest, end))
    return False
