"""What the sessions of an episode leave.

Owns: :func:`session_trajectories`: which trajectory holds which rewards and metrics, and within which group it is
compared. Refuses: deciding how an episode ended (``runner.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from turnwise.agents.core import Episode
from turnwise.agents.rewards import Reward
from turnwise.agents.roles import Compare, compared_within
from turnwise.inference.session import Session
from turnwise.rollout.sessions import metrics_of, turn_metrics
from turnwise.trajectory import Trajectory


def session_trajectories(
    blank: Trajectory,
    opened: Mapping[str, tuple[Session, str]],
    episode: Episode | None,
    *,
    compare: Compare,
    save_messages: bool,
) -> list[Trajectory]:
    """Return one trajectory for each session, the main one first, else in the order in which they were opened.

    Args:
        blank: What all have in common. It is the one that there is where no session was opened.
        opened: Session and policy by the session's name.
        episode: Holds rewards and metrics; None where the environment did not reset.
        compare: Who is compared with whom.
        save_messages: Whether segments hold their messages.
    """
    rewards = episode.rewards if episode is not None else []
    metrics = episode.metrics if episode is not None else {}
    if not opened:
        return [replace(blank, rewards=_events(rewards, "main"), metrics=blank.metrics | metrics)]
    result: list[Trajectory] = []
    for name, (session, policy) in sorted(opened.items(), key=lambda item: item[0] != "main"):
        # What was counted of the episode stands once, in its first trajectory.
        counted = metrics_of(session, blank.metrics) | ({} if result else metrics)
        result.append(
            replace(
                blank,
                id=session.id,
                group_id=compared_within(blank.group_id, name, policy, compare),
                agent=name,
                policy=policy,
                reasoning=session.reasoning,
                echo=session.echo,
                recorded=session.recorded_as,
                segments=session.segments(messages=save_messages),
                rewards=_events(rewards, name),
                metrics=counted,
                turn_metrics=turn_metrics(session, name, episode),
                states=_states(episode, name),
            )
        )
    return result


def _events(rewards: Sequence[Reward], agent: str) -> list[tuple[str | None, str, float]]:
    return [(each.turn_id, each.name, each.value) for each in rewards if each.agent == agent]


def _states(episode: Episode | None, agent: str) -> dict[str, str]:
    held = episode.states.items() if episode is not None else ()
    return {turn or "": state for (name, turn), state in held if name == agent}
