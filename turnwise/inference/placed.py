"""A request of a session, from where it was placed to what was recorded of it.

Owns: :class:`Placed` and :class:`Recorded`. Refuses: placing and recording; only ``session.py`` does that.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.inference.canonical import Canonical
from turnwise.inference.core import Renderer
from turnwise.inference.tree import Match, Opened
from turnwise.types import Completion, Message, SamplingParams, TokenPrompt


@dataclass(slots=True)
class Placed:
    """A request that was placed and is yet to be answered."""

    messages: list[Canonical]
    match: Match
    prompt: TokenPrompt
    params: SamplingParams
    fork: str | None
    renderer: Renderer

    def opened(self) -> Opened:
        """Return how it was placed."""
        new = 0 if self.match.context is not None else len(self.match.ids)
        return Opened(len(self.prompt.ids), len(self.prompt.ids) - new, self.match.ids)


@dataclass(slots=True)
class Recorded:
    """A turn that was recorded.

    Attributes:
        opened: How its request was placed.
        completion: What was sampled.
        message: What the agent is given.
    """

    opened: Opened
    completion: Completion
    message: Message
