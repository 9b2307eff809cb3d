"""What an agent may use of its episode.

Owns: :class:`EpisodeLimits`. Refuses: enforcing them; sessions and the runner do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an agent may use; the session and the runner enforce it.

    Attributes:
        max_turns: Model calls per session.
        max_tokens_per_turn: Tokens of one completion, None up to the context.
        context_length: Tokens of prompt and completion together.
    """

    max_turns: int
    max_tokens_per_turn: int | None
    context_length: int
