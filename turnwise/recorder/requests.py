"""Requests and turns of a session: a placed request before its completion, and a recorded turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from turnwise.model.canonical import Canonical
from turnwise.model.core import Renderer
from turnwise.recorder.tree import Match, PromptPlacement
from turnwise.types import Completion, Message, SamplingParams, TokenDelta, TokenPrompt, last_rows


@dataclass(slots=True)
class PendingRequest:
    """A request placed in the tree, not yet completed; ``key``: what its repetitions have in common, or ``""``."""

    messages: list[Canonical]
    match: Match
    prompt: TokenPrompt
    params: SamplingParams
    fork: str | None
    renderer: Renderer
    key: str = ""
    began: float = field(default_factory=time.time)
    _clock: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # Tokens that earlier requests had are recorded with their routes.
        self.params = replace(self.params, routes_from=self.placement().known_tokens)

    def routed_match(self, completion: Completion) -> Match:
        """Return the match, a new context of it with its routes."""
        routes, match = completion.routed_experts, self.match
        if routes is None or match.context is not None:
            return match
        before = routes[: len(routes) - len(completion.token_ids)]
        return replace(match, routes=last_rows(before, len(match.token_ids)))

    def times(self) -> tuple[float, float]:
        """Return when it began and the present, in seconds since 1970; a clock that is set does not change the time."""
        return round(self.began, 4), round(self.began + time.monotonic() - self._clock, 4)

    def placement(self) -> PromptPlacement:
        """Return the placement."""
        new = 0 if self.match.context is not None else len(self.match.token_ids)
        return PromptPlacement(len(self.prompt.token_ids), len(self.prompt.token_ids) - new, self.match.token_ids)


@dataclass(slots=True)
class RecordedTurn:
    """A recorded turn: placement of its request, completion, and message for the agent."""

    placement: PromptPlacement
    completion: Completion
    message: Message

    def pieces(self) -> Iterator[PromptPlacement | TokenDelta | Message]:
        """Yield what a stream of the turn yields, the completion in one delta."""
        yield self.placement
        done = self.completion
        version = done.weight_versions[-1][0] if done.weight_versions else None
        yield TokenDelta(done.token_ids, done.logprobs, version, done.finish_reason, done.weight_versions)
        yield self.message
