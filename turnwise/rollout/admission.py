"""How many groups may be asked for now.

Owns: :class:`Admission`. Pure: a loop says where it stands, and hears a number. Refuses: asking (``trainer/feed.py``)
and choosing (``rollout/strategies``).

A group that is asked for now has tokens of the servers' weights, version v, and may be trained in the steps up to
``v + 1 + bound``. Between the step that is sampled next and that one there is room for so many batches; whatever else
waits or flies is older, and goes first. So as long as no more groups are outstanding than there is room for, each can
be trained in time: with ``wait`` nothing is dropped, and with ``drop`` only what takes longer than the bound.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """How far rollouts may run ahead of training.

    Attributes:
        groups: Fresh groups that a train step takes.
        ahead: Batches that are asked for beyond the one that is trained next.
        bound: Most train steps that a group's weights may be old; None sets none.
    """

    groups: int
    ahead: int = 1
    bound: int | None = None

    def room(self, *, outstanding: int, version: int, step: int, taken: int = 0) -> int:
        """Return how many more groups may be asked for.

        Args:
            outstanding: Groups that were asked for and are neither handed out to a step nor dropped.
            version: The weight version of the servers.
            step: The step whose batch is sampled next: ``version + 1`` between steps, ``version + 2`` while the batch
                of step ``version + 1`` is trained.
            taken: Groups that were handed out for that step before.
        """
        later = self.ahead if self.bound is None else min(self.ahead, version + 1 + self.bound - step)
        return max(0, (later + 1) * self.groups - taken - outstanding)
