"""What a session may use, and what is left of it for one request.

Owns: :class:`SessionLimits` and :func:`room_for`. Refuses: counting; the session says what was used.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.errors import BudgetSpent
from turnwise.types import StopReason


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session may use.

    Attributes:
        context_length: Most tokens that prompt and completion may have together.
        max_tokens_per_turn: Most tokens of one completion.
        max_total_tokens: Most committed tokens over all branches, prompts included. Nothing is reserved for requests
            in flight: those that sample at the same time may go beyond it together.
        max_turns: Most model calls.
    """

    context_length: int
    max_tokens_per_turn: int | None = None
    max_total_tokens: int | None = None
    max_turns: int | None = None


def room_for(
    limits: SessionLimits, session_id: str, *, prompt: int, committed: int, requests: int, wanted: int | None
) -> int:
    """Return how many tokens a request may sample.

    Args:
        limits: Of the session.
        session_id: Whose error it is.
        prompt: Tokens of the prompt.
        committed: Tokens of the session so far, over all branches.
        requests: How many were sent before.
        wanted: The request's own limit.

    Raises:
        BudgetSpent: Nothing is left.
    """
    if limits.max_turns is not None and requests >= limits.max_turns:
        raise BudgetSpent(
            StopReason.MAX_TURNS,
            f"session {session_id}: all {limits.max_turns} turns are used",
            used=requests,
            limit=limits.max_turns,
        )
    room = limits.context_length - prompt
    if room <= 0:
        raise BudgetSpent(
            StopReason.CONTEXT_OVERFLOW,
            f"session {session_id}: the prompt has {prompt} tokens, the context {limits.context_length}",
            used=prompt,
            limit=limits.context_length,
        )
    allowed = [room]
    if limits.max_total_tokens is not None:
        left = limits.max_total_tokens - committed
        if left <= 0:
            raise BudgetSpent(
                StopReason.MAX_TOKENS,
                f"session {session_id}: all {limits.max_total_tokens} tokens are used",
                used=committed,
                limit=limits.max_total_tokens,
            )
        allowed.append(left)
    return min(allowed + [n for n in (limits.max_tokens_per_turn, wanted) if n is not None])
