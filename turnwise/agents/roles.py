"""Names of agents within an episode, the roles that they play, and who is compared with whom.

A session's name says its role: ``solver`` and ``solver/0`` are of the role ``solver``, so an episode may have several
sessions of one role.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from turnwise.errors import AgentError, shown

TRAINED: Final = "main"
"""The policy that is trained."""

Compare = Literal["role", "agent", "together"]
"""Whose rewards a session's reward is compared with, within the group of its task."""

# Names travel in ids, HTTP headers and names of metrics, where "~" and "@" mean something.
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)*")


def role_of(agent: str) -> str:
    """Return the role that a session's name says: what stands before its first slash."""
    return agent.partition("/")[0]


def check_name(agent: str) -> str:
    """Return a name that a session may have.

    Raises:
        AgentError: It may not.
    """
    if not isinstance(agent, str) or not _NAME.fullmatch(agent):
        raise AgentError(
            f"a session's name is {shown(agent)}: it must be letters, digits, '_', '-' and '.', such as 'solver', or "
            "'solver/0' where an episode has several of one role"
        )
    return agent


def compared_within(group_id: str, agent: str, policy: str, compare: Compare) -> str:
    """Return the id of the group that a session's trajectory is compared within.

    Args:
        group_id: The group of its task.
        agent: The session's name.
        policy: Who sampled in it. What a frozen policy did is compared with nothing that is trained.
        compare: ``role``: with sessions of its role, those of its own episode included; ``agent``: with those of
            exactly its name; ``together``: with all that are trained.
    """
    name = agent if compare == "agent" else role_of(agent)
    if policy != TRAINED:
        return f"{group_id}/{name}@{policy}"
    return group_id if compare == "together" or name == "main" else f"{group_id}/{name}"
