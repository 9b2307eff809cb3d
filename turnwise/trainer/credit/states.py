"""In which state a turn began: what credit by groups of steps compares turns by.

Owns: :func:`anchors`. Refuses: comparing them (``advantages.gigpo``) and naming states (an environment does, in
``info["state"]``).
"""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b

from turnwise.errors import TrainError
from turnwise.trainer.algorithm import AnchorState
from turnwise.trajectory import Trajectory


def anchors(trajectory: Trajectory, state: AnchorState | None) -> list[Hashable]:
    """Return what identifies the state before each turn, in commit order. Equal ones are the same state.

    Args:
        trajectory: Whose turns.
        state: ``named``: what the environment called the state after the turn before it in the same branch, or the one
            that the session began in. ``seen``: all ids that the model saw. ``shown``: the ids that came since the turn
            before it in the same branch. None: ``named`` where the environment named the state, else ``seen``.

    Raises:
        TrainError: States must be named, and one is not.
    """
    # Of the ids up to each segment's end, and of those since the turn before it: how they were cut says nothing.
    whole: list[blake2b] = []
    since: list[blake2b] = []
    names: list[str | None] = []
    found: list[Hashable] = []
    for segment in trajectory.segments:
        root = segment.parent < 0
        before = blake2b(digest_size=16) if root else whole[segment.parent].copy()
        news = blake2b(digest_size=16) if root else since[segment.parent].copy()
        name = trajectory.states.get("") if root else names[segment.parent]
        if segment.sampled:
            if state == "named" and name is None:
                raise TrainError(
                    f"algorithm.credit.state is named, but the environment named none before turn {len(found)} of "
                    f"trajectory {trajectory.id}: return info['state'] (a text or a whole number) from reset and step, "
                    "or set it to seen or shown"
                )
            named = name is not None and state in (None, "named")
            found.append(("named", name) if named else (news if state == "shown" else before).digest())
            name = trajectory.states.get(segment.turn_id or "")
        ids = segment.ids.tobytes()
        before.update(ids)
        news.update(ids)
        whole.append(before)
        since.append(blake2b(digest_size=16) if segment.sampled else news)
        names.append(name)
    return found
