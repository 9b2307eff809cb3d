"""Session names, roles and comparison groups within an episode.

The role is the name up to its first slash: ``solver`` and ``solver/0`` both have the role ``solver``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal

from turnwise.errors import AgentError, ConfigError, nearest, shown

MAIN: Final = "main"
"""The policy of roles that ``rollout.roles`` does not map."""

JUDGES: Final = "reward"
"""The role of sessions in which a frozen policy judges."""

Compare = Literal["role", "agent", "together"]
"""Whose rewards a session's reward is compared with, within the group of its task."""

# Names travel in ids, HTTP headers and names of metrics, where "~" and "@" mean something.
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)*")


def role_of(agent: str) -> str:
    """Return the role of a session: its name up to the first slash."""
    return agent.partition("/")[0]


def policy_of(agent: str, roles: Mapping[str, str]) -> str:
    """Return the policy of a session by ``rollout.roles``: that of its name, else of its role, else ``main``."""
    return roles.get(agent) or roles.get(role_of(agent), MAIN)


def check_played(agents: Iterable[str], roles: Mapping[str, str], policies: Collection[str]) -> None:
    """Check that the policy of each agent of an environment is known.

    Raises:
        ConfigError: One is not.
    """
    for agent in agents:
        if (policy := policy_of(agent, roles)) not in policies:
            raise ConfigError(
                f"rollout.roles: the environment's agent {agent!r} has the policy {policy!r}, which does not exist: "
                f"map the role {role_of(agent)!r} to one of {', '.join(policies)}"
            )


def check_judge(policy: str, frozen: Collection[str], where: str) -> None:
    """Check that the policy of a judge, which the key ``where`` names, is frozen. Raises ConfigError."""
    if policy not in frozen:
        raise ConfigError(
            f"{where} is {policy!r}, which is not in rollout.frozen{nearest(policy, frozen)}: add "
            f"rollout.frozen.{policy} with model, the directory of a model; a trained policy cannot "
            "judge, since its grades would change with it"
        )


def check_name(agent: str) -> str:
    """Check a session's name and return it."""
    if not isinstance(agent, str) or not _NAME.fullmatch(agent):
        raise AgentError(
            f"a session's name is {shown(agent)}: it must be letters, digits, '_', '-' and '.', such as 'solver', or "
            "'solver/0' where an episode has several agents of one role"
        )
    return agent


def compared_within(group_id: str, agent: str, policy: str, compare: Compare, *, frozen: bool = False) -> str:
    """Return the id of the group that a session's trajectory is compared within.

    Args:
        group_id: Group of the task.
        agent: Session name.
        policy: Its policy. Sessions of different policies are never compared.
        compare: ``role``: with sessions of its role, its own episode's included; ``agent``: with those of its name;
            ``together``: with all of its policy, unless that is frozen.
        frozen: Whether the policy is frozen.
    """
    name = agent if compare == "agent" else role_of(agent)
    if policy != MAIN:
        return f"{group_id}@{policy}" if compare == "together" and not frozen else f"{group_id}/{name}@{policy}"
    return group_id if compare == "together" or name == "main" else f"{group_id}/{name}"
