"""Which finished groups a train step learns from.

Owns: :class:`GroupFacts` and :class:`Flight` (what a choice is made by), :class:`Strategy` and those that ship. All of
it is pure: the same facts give the same choice, so that it can be tested on a simulated clock. Refuses: waiting,
keeping and journalling groups (``replay.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What is known of a finished group without its tokens.

    Attributes:
        id: The group's.
        key: What was asked for (:attr:`~turnwise.rollout.core.RolloutRequest.key`); the group's id where nobody asked.
        task_id: Its task.
        partition: ``train`` or ``val``.
        arrived: Its place in the order in which groups arrived, from 0.
        oldest_version: The oldest weights that sampled a token of it; None where nothing was sampled.
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


@dataclass(frozen=True, slots=True)
class Flight:
    """A group that was asked for and is not finished.

    Attributes:
        key: What was asked for.
        task_id: Its task.
        partition: ``train`` or ``val``.
        version: The weight version of the servers when it was asked for: none of its tokens is older.
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
        drop: (id of a finished group, why) that will never be taken. It is counted under that name.
        refill: Whether what a batch lacks may be asked for while this waits.
    """

    take: tuple[str, ...] | None = None
    drop: tuple[tuple[str, str], ...] = ()
    refill: bool = True


class Strategy(ABC):
    """Chooses the groups of a batch."""

    @abstractmethod
    def choose(self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int) -> Choice:
        """Choose, or wait. Called at every change while somebody waits for a batch.

        Args:
            ready: Finished groups of the partition, in the order of their arrival.
            flying: Groups of the partition that are not finished.
            step: The train step that asks; it learns with the weights of version ``step - 1``.
            batch_size: How many groups a batch has.
        """


class Arrival(Strategy):
    """The groups that arrived first, whatever weights sampled them.

    Args:
        order: How the groups of one batch are ordered: ``arrival``, or ``id`` for an order that does not depend on
            which episode ended first, so that a synchronous run is repeatable.
    """

    def __init__(self, order: Literal["arrival", "id"] = "arrival") -> None:
        self._order = order

    def choose(self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int) -> Choice:
        """Take the first ``batch_size`` groups."""
        del flying, step
        if len(ready) < batch_size:
            return Choice()
        taken = [each.id for each in ready[:batch_size]]
        return Choice(tuple(sorted(taken) if self._order == "id" else taken))
