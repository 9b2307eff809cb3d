"""What becomes of groups whose members failed for good.

Owns: :class:`MemberRule` (which ragged groups are trained) and :class:`FailureWatch` (when a run gives up). Refuses:
trying members again (``producer.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.errors import TrainError
from turnwise.trajectory import TrajectoryGroup

FAILED = "failed"
"""Why such a group is dropped, as it is counted."""


@dataclass(frozen=True, slots=True)
class MemberRule:
    """Which groups are whole enough to be trained.

    Attributes:
        least: Fewest members without an error. At least 1: a group without members teaches nothing, whatever else.
        whole: Whether no member may have failed.
    """

    least: int = 1
    whole: bool = False

    def refuses(self, group: TrajectoryGroup) -> str | None:
        """Return why a finished group is not trained, or None where it may be."""
        failed = {each.episode_id for each in group.trajectories if each.error is not None}
        members = {each.episode_id for each in group.trajectories} - failed
        if len(members) < max(1, self.least) or (self.whole and (failed or group.failed)):
            return FAILED
        return None


class FailureWatch:
    """Counts groups in a row of which no member is left.

    One of them is bad luck and replaced by the next; when nothing else comes, more of them will not help.

    Args:
        most: How many end the run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._row = 0
        self._last = "none was told"

    def failed(self, error: str) -> None:
        """Note what ended an episode."""
        self._last = error

    def arrived(self, group: TrajectoryGroup) -> TrainError | None:
        """Note a finished group; return what ends the run, if it does."""
        if group.partition != "train":
            return None
        lost = MemberRule().refuses(group) is not None
        self._row = self._row + 1 if lost else 0
        if self._row < self._most:
            return None
        return TrainError(
            f"every episode of {self._row} groups in a row ended in an error (rollout.max_failed_groups is "
            f"{self._most}); the last one: {self._last}"
        )
