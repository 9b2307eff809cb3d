"""Reward events of an episode, and whose they are.

Owns: :class:`Reward`, :func:`finite` and :func:`check_owners`. Refuses: sums, comparisons and weights; those are the
trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from turnwise.errors import AgentError


@dataclass(slots=True)
class Reward:
    """A reward event: which session and turn it belongs to (None: to the episode), its name and value."""

    agent: str
    turn_id: str | None
    name: str
    value: float


def finite(what: str, value: float) -> None:
    """Refuse a number that is none.

    Raises:
        AgentError: It is not finite.
    """
    if not math.isfinite(value):
        raise AgentError(f"{what} is {value}: it must be a finite number")


def check_owners(rewards: Iterable[Reward], sessions: Collection[str]) -> None:
    """See that every reward has a session whose trajectory holds it. Where there is none at all, that of ``main`` does.

    Raises:
        AgentError: A reward would be lost.
    """
    owners = set(sessions) or {"main"}
    lost = [reward for reward in rewards if reward.agent not in owners and reward.value]
    if lost:
        held = ", ".join(sorted(sessions)) or "none"
        raise AgentError(
            f"the reward {lost[0].name!r} ({lost[0].value:g}) is for {lost[0].agent!r}, which has no session; the "
            f"episode's sessions: {held}. Name one of them (info['agent_rewards'], ScoreParts(agents=...), "
            "episode.note(agent=...)), or open a session for it with episode.session_for, also where it may never speak"
        )
