"""Forks of sessions: the recorded turns that a fork replays, and the search for the turn that answers a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from turnwise.errors import SessionError
from turnwise.model.canonical import Canonical
from turnwise.model.core import Renderer
from turnwise.recorder.completion import parse_completion, read_completion
from turnwise.recorder.history import snapshot
from turnwise.recorder.matching import RootKey, same_message
from turnwise.recorder.requests import RecordedTurn
from turnwise.recorder.tree import NO_IDS, Node, PromptPlacement, path_ids, path_tokens
from turnwise.types import Completion, Message, SamplingParams, TokenIds


class RequestGate(Protocol):
    """What a request waits at before it samples: there a forked episode resumes from its fork."""

    def note_repeat(self) -> None:
        """Note that a turn before the fork was replayed."""

    async def admit(self, *, first: bool) -> None:
        """Wait until a request may sample; an error raised here fails the request.

        Args:
            first: Whether it is the request of the turn that the fork samples again.
        """


@dataclass(slots=True)
class Prefix:
    """The turns before a fork.

    A forked session answers the requests of these turns with what was sampled. Every other request samples: that of
    ``resampled`` first.

    Attributes:
        session_id: For error messages.
        messages: Messages of turns as they were returned, by turn id.
        remaining: The turns that were not requested yet, in commit order.
        resampled: The turn that the first request samples again, until it does; None where that may be any request.
    """

    session_id: str
    messages: Mapping[str, Message]
    remaining: list[Node] = field(default_factory=list)
    resampled: Node | None = None

    @property
    def exhausted(self) -> bool:
        """Whether all turns before the fork were replayed, and every request samples."""
        return not self.remaining and self.resampled is None

    async def replay(
        self, answers: Callable[[Node], bool], gate: RequestGate | None, request: str
    ) -> RecordedTurn | None:
        """Return the turn before the fork that answers a request; None for a request that samples, once it may.

        Args:
            answers: Whether a turn answered this request.
            gate: Of the session.
            request: The request, for error messages.

        Raises:
            SessionError: Turns before the fork remain, none of which answers this request, and there is no gate to
                wait at.
        """
        turn = next(filter(answers, self.remaining), None)
        if turn is not None:
            self.remaining.remove(turn)
            if gate is not None:
                gate.note_repeat()
            return _recorded_turn(turn, self.messages[turn.turn_id or ""])
        first = self.resampled is not None and answers(self.resampled)
        if gate is not None:
            await gate.admit(first=first)
        elif self.remaining or not (first or self.resampled is None):
            raise SessionError(
                f"session {self.session_id}: the agent's request is none of the episode that was forked ({request}; "
                f"{len(self.remaining)} turns before the fork are left): an agent that is forked must make the same "
                "requests when it sees the same answers"
            )
        if first:
            self.resampled = None
        return None


def returned_turn(turn: Node, message: Message | None, renderer: Renderer, params: SamplingParams) -> RecordedTurn:
    """Return a turn of the tree as it was returned.

    Args:
        turn: The turn.
        message: Its message as it was returned; None if another process did, where its ids are parsed again.
        renderer: The session's renderer.
        params: Sampling parameters of its request.
    """
    if message is None:
        assert turn.parent is not None
        reader, tail = renderer.under(turn.key[1]), turn.parent.token_ids
        parsed, cut = read_completion(reader, _completion(turn), tail, turn.tools, params)
        message, _ = parse_completion(parsed, int((turn.turn_id or "t0")[1:]), (), cut=cut)
        if calls := message.get("tool_calls"):
            ids = [call.id for call in turn.messages[0].calls]
            message["tool_calls"] = [replace(call, id=name) for call, name in zip(calls, ids, strict=True)]
    return _recorded_turn(turn, message)


def _recorded_turn(turn: Node, message: Message) -> RecordedTurn:
    assert turn.parent is not None
    prompt = path_tokens(turn.parent)
    return RecordedTurn(PromptPlacement(prompt, prompt, turn.parent.token_ids), _completion(turn), snapshot(message))


def _completion(turn: Node) -> Completion:
    assert turn.completion is not None
    sampled = turn.completion
    return Completion(turn.token_ids, sampled.logprobs, sampled.finish_reason, sampled.weight_versions)


def exclude_other_forks(
    candidates: tuple[list[tuple[Node, int]], Node | None], inherited: Collection[str] | None, sampled: Collection[str]
) -> tuple[list[tuple[Node, int]], Node | None]:
    """Return the matches of a request without those that other forks of the session sampled.

    Two forks may have sampled equal messages, and not every agent sends the ids that tell them apart.

    Args:
        candidates: Turns with the number of messages up to them, and a context of all messages; see
            ``Tree.find_matches``.
        inherited: Ids of the turns before the session's fork; None where nothing was forked.
        sampled: Ids of the turns that this session sampled.
    """
    if inherited is None:
        return candidates
    turn_ids = {*inherited, *sampled}

    def belongs(node: Node) -> bool:
        return all(ancestor.turn_id in turn_ids for ancestor in node.path() if ancestor.sampled)

    turns, context = candidates
    return [turn for turn in turns if belongs(turn[0])], context if context is not None and belongs(context) else None


def answers_ids(turn: Node, prompt: TokenIds) -> bool:
    """Return whether a turn answered a prompt of exactly these ids."""
    return np.array_equal(path_ids(turn.parent, NO_IDS), prompt)


def answers_messages(turn: Node, messages: Sequence[Canonical], key: RootKey) -> bool:
    """Return whether a turn answered a request of exactly these messages, under the same root key."""
    return turn.key == key and _answers(turn, messages)


def _answers(turn: Node, messages: Sequence[Canonical]) -> bool:
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
        if end <= len(messages) and all(same_message(*pair, sampled=node.sampled) for pair in pairs):
            pending.append((rest, end))
    return False
