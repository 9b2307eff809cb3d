"""What an environment calls the states that its moves are made in: ``info["state"]`` of ``reset`` and ``step``.

Owns: where such a name is kept, by session and turn. Refuses: comparing turns by it (``trainer/algorithms/credit.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

States: TypeAlias = dict[tuple[str, str | None], str]
"""The state after a turn, by session and turn id; the id is None for the one that the session begins in."""


def first_state(info: Mapping[str, Any]) -> States:
    """Return what ``reset`` said, for the session that moves first."""
    state = _named(info)
    return {} if state is None else {(info.get("turn") or "main", None): state}


def note_state(
    states: States, info: Mapping[str, Any], agent: str, turn: str | None, last_turn: Callable[[str], str | None]
) -> None:
    """Note what a step said, for the session that moves next.

    Args:
        states: What is known so far; added to.
        info: What the step returned.
        agent: The session whose message it was.
        turn: Its turn; without one nothing is noted.
        last_turn: Tells the last turn of another session, None where it had none.
    """
    state, mover = _named(info), info.get("turn") or agent
    if state is not None and turn is not None:
        states[mover, turn if mover == agent else last_turn(mover)] = state


def _named(info: Mapping[str, Any]) -> str | None:
    """Return a name; what is no text and no whole number is the environment's own affair."""
    state = info.get("state")
    return str(state) if isinstance(state, (str, int)) and not isinstance(state, bool) else None
