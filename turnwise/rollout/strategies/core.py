"""The contract of what chooses the groups of a batch.

Owns: :class:`GroupFacts` and :class:`Flight` (what a choice is made by), :class:`Choice` and :class:`Strategy`. All of
it is pure: the same facts give the same choice, so that it can be tested on a simulated clock. Refuses: waiting,
keeping and journalling groups (``rollout/replay.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STALE = "stale"
"""Why a group is dropped that was sampled by weights that are too old."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What is known of a finished group without its tokens.

    Attributes:
        id: The group's.
        key: What was asked for (:attr:`~turnwise.rollout.core.RolloutRequest.key`); the group's id where nobody asked.
        task_id: Its task.
        partition: ``train`` or ``val``.
        arrived: Its place in the order in which groups arrived, from 0.
        oldest_version: The oldest weights that sampled a token of it. Where nothing was sampled, those of the servers
            when it was asked for; None where nobody asked, either.
        rewards: Of its members, failed ones left out.
        failed: Members that ended in an error.
        sampled_tokens: Of all its members.
        uses: How many batches it was part of.
        spread: How far what is compared with each other lies apart, by the name of a reward; ``reward`` is their sum.
    """

    id: str
    key: str
    task_id: str
    partition: str
    arrived: int
    oldest_version: int | None
    rewards: tuple[float, ...]
    failed: int = 0
    sampled_tokens: int = 0
    uses: int = 0
    spread: Mapping[str, float] = field(default_factory=dict)

    def staleness(self, step: int) -> int:
        """Return how many train steps the weights of step ``step`` are ahead of the oldest that sampled it.

        Weights of a version that a crash lost, and that the run has not reached again, count as those of the step.
        """
        return 0 if self.oldest_version is None else max(0, step - 1 - self.oldest_version)


@dataclass(frozen=True, slots=True)
class Flight:
    """A group that was asked for and is not finished.

    Attributes:
        key: What was asked for.
        task_id: Its task.
        partition: ``train`` or ``val``.
        version: The weight version of the servers when it was asked for, or what sampled a member that an earlier
            process finished: none of its tokens is older. A group that still waits for ``rollout.concurrency`` will be
            newer: a strategy that waits for flights may wait for it a step sooner than it has to, never later.
    """

    key: str
    task_id: str
    partition: str
    version: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What a strategy wants.

    Attributes:
        take: Ids of the groups of the batch, in order; None waits for the next change.
        drop: (id of a finished group, why) that will never be taken. It is counted as ``replay/dropped/WHY``.
        refill: Whether what a batch lacks may be asked for while this waits.
    """

    take: tuple[str, ...] | None = None
    drop: tuple[tuple[str, str], ...] = ()
    refill: bool = True


class Strategy(ABC):
    """Chooses the groups of a batch.

    Attributes:
        keep_groups: How many groups that were trained stay, to be chosen again; the others are forgotten.
        max_uses: How many batches a group may be part of.
    """

    keep_groups: int = 0
    max_uses: int = 1

    @abstractmethod
    def choose(
        self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Choose, or wait. Called at every change while somebody waits for a batch.

        Args:
            ready: Finished groups of the partition, in the order of their arrival; those with ``uses`` were trained.
            flying: Groups of the partition that are not finished.
            step: The train step that asks; it learns with the weights of version ``step - 1``.
            batch_size: How many groups are asked for.
            taken: How many groups were handed out for this step before: a step may ask for parts of its batch.
        """

    def lacks(self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int) -> int:
        """Return how many groups a choice waits for that are neither here nor in flight: they are asked for then."""
        del step
        fresh = sum(each.uses == 0 for each in ready)
        return max(0, batch_size - fresh - len(flying))
