"""Forks of sessions: the turns that a fork gives again, and the search for the one that a request asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from turnwise.errors import SessionError
from turnwise.model.canonical import Canonical
from turnwise.recorder.history import snapshot
from turnwise.recorder.matching import RootKey, same
from turnwise.recorder.requests import RecordedTurn
from turnwise.recorder.tree import NO_IDS, Node, PromptPlacement, joined, path_tokens
from turnwise.types import Completion, Message, TokenIds


@dataclass(slots=True)
class Prefix:
    """The turns before a fork.

    A forked session answers the requests of these turns with what was sampled, until the last of them is given; the
    next request is the first that samples.

    Attributes:
        session_id: For error messages.
        said: Messages of turns as they were returned, by turn id.
        left: The turns that were not asked for yet, in commit order.
        first: What the first request that samples ends in; None where it may be anything.
    """

    session_id: str
    said: Mapping[str, Message]
    left: list[Node] = field(default_factory=list)
    first: Node | None = None

    def take(self, messages: Sequence[Canonical], key: RootKey) -> RecordedTurn:
        """Return the turn that answers a request.

        Args:
            messages: The canonical messages of the request.
            key: Its root key.

        Raises:
            SessionError: None of the turns that are left answered this request.
        """
        found = next((node for node in self.left if node.key == key and _asked(node, messages)), None)
        return self._taken(found, f"the last message is {messages[-1].text[:200]!r}")

    def take_ids(self, prompt: TokenIds) -> RecordedTurn:
        """Return the turn that answers a prompt of these ids; raises as :meth:`take`."""
        found = next((node for node in self.left if np.array_equal(joined(node.parent, NO_IDS), prompt)), None)
        return self._taken(found, f"a prompt of {len(prompt)} ids")

    def check_first(self, prompt: TokenIds) -> None:
        """Check the prompt of a request that samples, the first time. Raises SessionError where it is another one."""
        first, self.first = self.first, None
        if first is not None and not np.array_equal(joined(first, NO_IDS), prompt):
            raise self._diverged(f"a prompt of {len(prompt)} ids, which is not that of the turn to sample again")

    def _taken(self, turn: Node | None, asked: str) -> RecordedTurn:
        if turn is None:
            raise self._diverged(asked)
        assert turn.parent is not None
        assert turn.completion is not None
        self.left.remove(turn)
        sampled = turn.completion
        completion = Completion(turn.token_ids, sampled.logprobs, sampled.finish_reason, sampled.weight_versions)
        prompt = path_tokens(turn.parent)
        placement = PromptPlacement(prompt, prompt, turn.parent.token_ids)
        return RecordedTurn(placement, completion, snapshot(self.said[turn.turn_id or ""]))

    def _diverged(self, asked: str) -> SessionError:
        return SessionError(
            f"session {self.session_id}: the agent asks for something else than in the episode that was forked "
            f"({asked}; {len(self.left)} turns before the fork are left): an agent that is forked must repeat itself "
            "when it sees the same answers"
        )


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
