"""Which turns a session of this process has recorded.

Owns: :func:`recorded_turns`. Refuses: sessions that another process records; they tell it themselves.
"""

from __future__ import annotations

from turnwise.inference.session import Session


async def recorded_turns(session: Session) -> list[str]:
    """Return the ids of the turns that a session of this process has recorded, in order."""
    return [each.turn_id for each in session.segments(messages=False) if each.sampled and each.turn_id is not None]
