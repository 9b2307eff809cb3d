"""What an episode notes beside its tokens: rewards of turns, and states of the environment after them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from turnwise.errors import AgentError


@dataclass(slots=True)
class Reward:
    """A named reward of a session's turn, or of the episode where ``turn_id`` is None."""

    agent: str
    turn_id: str | None
    name: str
    value: float


def check_finite(what: str, value: float) -> None:
    """Check that a number is finite."""
    if not math.isfinite(value):
        raise AgentError(f"{what} is {value}: it must be a finite number")


def check_owners(rewards: Iterable[Reward], sessions: Collection[str]) -> None:
    """Check that every reward's session is open; without any session, ``main`` counts as open."""
    owners = set(sessions) or {"main"}
    lost = [reward for reward in rewards if reward.agent not in owners and reward.value]
    if lost:
        names = ", ".join(sorted(sessions)) or "none"
        raise AgentError(
            f"the reward {lost[0].name!r} ({lost[0].value:g}) is for {lost[0].agent!r}, which has no session (the "
            f"episode's sessions: {names}). Name one of them (info['agent_rewards'], ScoreParts(agents=...), "
            "episode.note(agent=...)), or open a session for it with episode.session_for, also where it may never speak"
        )


States: TypeAlias = dict[tuple[str, str | None], str]
"""The state after a turn, by session and turn id; the id is None for the one that the session begins in."""


def first_state(info: Mapping[str, Any]) -> States:
    """Return the state of ``reset``, for the session that moves first."""
    state = _state_name(info)
    return {} if state is None else {(info.get("turn") or "main", None): state}


def note_state(
    states: States, info: Mapping[str, Any], agent: str, turn: str | None, last_turn: Callable[[str], str | None]
) -> None:
    """Note the state of a step, for the session that moves next.

    Args:
        states: Extended in place.
        info: Info of the step.
        agent: Session of the step's message.
        turn: Turn of that message; without one nothing is noted.
        last_turn: Returns the last turn of a session, or None.
    """
    state, mover = _state_name(info), info.get("turn") or agent
    if state is not None and turn is not None:
        states[mover, turn if mover == agent else last_turn(mover)] = state


def _state_name(info: Mapping[str, Any]) -> str | None:
    """Return ``info["state"]`` where it is a string or an integer."""
    state = info.get("state")
    return str(state) if isinstance(state, (str, int)) and not isinstance(state, bool) else None
