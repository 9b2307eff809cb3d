"""Store of finished groups: in memory up to a limit or in a payload store, and on disk through the journal.

A payload store keeps trajectories outside of this process, as rows by key. A row is one trajectory in columns
(``turnwise.columns.DTYPES``), so that a reader fetches only those that it needs.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated
from uuid import uuid4

from pydantic import Field

from turnwise.columns import DTYPES, Columns, pack_trajectory, unpack_trajectory
from turnwise.config import Section
from turnwise.errors import TrainError
from turnwise.rollout.core import GroupFacts
from turnwise.rollout.journal.journal import Journal
from turnwise.trajectory import Trajectory, TrajectoryGroup

_MB = 2**20


class TransferQueueConfig(Section):
    """A TransferQueue that holds finished groups (``backend: transfer_queue``).

    Attributes:
        units: Storage processes, each on one CPU of the Ray cluster; one more is the queue's controller.
        address: Ray cluster as ``host:port``, or ``local`` for one on this machine that ends with the run. By default
            the one that the process is connected to, else that of ``RAY_ADDRESS``, else ``local``.
    """

    units: Annotated[int, Field(gt=0)] = 2
    address: Annotated[str, Field(min_length=1)] | None = None


_OF_TOKENS = ("segments", "token_ids", "logprobs", "routes")


class PayloadsLost(TrainError):
    """A store does not answer, or no longer has what it was given: the run ends, and resumes from its journal."""


class PayloadStore(ABC):
    """Keeps rows by key outside of this process. Each method but ``start`` and ``close`` raises PayloadsLost."""

    @abstractmethod
    async def start(self) -> None:
        """Start the store or connect to it. Idempotent.

        Raises:
            TrainError: It cannot be had; the message says what is missing.
        """

    @abstractmethod
    async def put(self, rows: Mapping[str, Columns]) -> None:
        """Store rows; when it returns they can be read."""

    @abstractmethod
    async def get(self, keys: Sequence[str], columns: Sequence[str]) -> list[Columns]:
        """Return these columns of rows, in the order of the keys."""

    @abstractmethod
    async def clear(self, keys: Collection[str]) -> None:
        """Forget rows. Unknown keys are ignored."""

    @abstractmethod
    async def close(self) -> None:
        """End the store, or disconnect from one of another program. Idempotent."""


def columns_of(fields: Collection[str] | None) -> tuple[str, ...]:
    """Return the columns that hold these fields of a trajectory (``tokens``, ``messages`` ...); None for all."""
    if fields is None:
        return tuple(DTYPES)
    tokens = "tokens" in fields
    return ("record", *(_OF_TOKENS if tokens else ()), *(("messages",) if tokens and "messages" in fields else ()))


@dataclass(frozen=True, slots=True)
class Shipped:
    """A group whose trajectories are rows of a payload store.

    Attributes:
        head: The group without trajectories.
        members: Keys of its members' rows.
        baselines: Keys of its baselines' rows.
        nbytes: Bytes of all rows.
    """

    head: TrajectoryGroup
    members: tuple[str, ...]
    baselines: tuple[str, ...]
    nbytes: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all rows."""
        return self.members + self.baselines


class GroupStore:
    """Groups by the id of their facts.

    Args:
        journal: Records groups to train and reads them back; None keeps everything in memory.
        memory_mb: Memory for groups that can be read back, by :func:`memory_bytes`; in a payload store by that of rows.
        payloads: Holds the groups in the place of this process's memory.
    """

    def __init__(self, journal: Journal | None, memory_mb: int, payloads: PayloadStore | None = None) -> None:
        self._journal = journal
        self._budget = memory_mb * _MB
        # What is in no journal and no payload store: without them everything.
        self._only: dict[str, TrajectoryGroup] = {}
        self._keys: dict[str, str] = {}
        self._cached: OrderedDict[str, tuple[TrajectoryGroup, int]] = OrderedDict()
        self.cached_bytes = 0
        self._payloads = payloads
        self._shipped: dict[str, Shipped] = {}
        # Of these the groups that wait and can be read back, which may leave the store for room.
        self._waiting: OrderedDict[str, int] = OrderedDict()
        self._cleared: list[str] = []
        self._rows = f"{uuid4().hex[:12]}/"
        self._next_row = 0

    async def ship(self, group: TrajectoryGroup) -> Shipped | None:
        """Give a group to the payload store, if there is one, before :meth:`put` makes it count.

        Raises:
            FormatError: A trajectory cannot be written as JSON.
            PayloadsLost: The store was lost.
        """
        payloads = self._payloads
        if payloads is None:
            return None
        cleared, self._cleared = self._cleared, []
        if cleared:
            await payloads.clear(cleared)
        first = self._next_row
        self._next_row += len(group.trajectories) + len(group.baselines)
        keys = tuple(f"{self._rows}{number}" for number in range(first, self._next_row))
        members = (*group.trajectories, *group.baselines)
        rows = {key: pack_trajectory(trajectory) for key, trajectory in zip(keys, members, strict=True)}
        if rows:
            await payloads.put(rows)
        count = len(group.trajectories)
        nbytes = sum(column.nbytes for row in rows.values() for column in row.values())
        return Shipped(replace(group, trajectories=[], baselines=[]), keys[:count], keys[count:], nbytes)

    def put(self, group: TrajectoryGroup, facts: GroupFacts, shipped: Shipped | None = None) -> None:
        """Store a group; one to train is in the journal on return."""
        journaled = self._journal is not None and facts.partition == "train"
        if self._journal is not None and journaled:
            self._journal.group(group, facts)
            self._keys[facts.id] = facts.key
        if shipped is not None:
            self._shipped[facts.id] = shipped
            self.keep(facts.id)
        elif journaled:
            self._cache(facts.id, group)
        else:
            self._only[facts.id] = group

    def keep(self, name: str) -> None:
        """Note that a group waits, or waits again after it was trained: then it may leave the store for room."""
        shipped = self._shipped.get(name)
        if shipped is None or name not in self._keys:
            return
        self._waiting[name] = shipped.nbytes
        waiting_bytes = sum(self._waiting.values())
        while waiting_bytes > self._budget:
            oldest, nbytes = self._waiting.popitem(last=False)
            waiting_bytes -= nbytes
            self._cleared += self._shipped.pop(oldest).keys

    def restore(self, key: str, arrived: int) -> GroupFacts | None:
        """Return the facts of a group that an earlier process finished, or None."""
        facts = None if self._journal is None else self._journal.facts(key, arrived)
        if facts is not None:
            self._keys[facts.id] = key
        return facts

    def reusable(self, limit: int) -> list[GroupFacts]:
        """Return the facts of up to ``limit`` groups that may be trained again, least recently trained first."""
        reusable = [] if self._journal is None else list(self._journal.reusable)
        latest = reusable[max(0, len(reusable) - limit) :]
        self._keys |= {facts.id: facts.key for facts in latest}
        return latest

    @property
    def next_step(self) -> int:
        """The step that a run begins or resumes with."""
        return 1 if self._journal is None else self._journal.next_step

    def begun_by(self, key: str, version: int) -> int:
        """Return the oldest weights of members from earlier processes, at most ``version``."""
        restored = None if self._journal is None else self._journal.restore(key)
        members = [] if restored is None else list(restored.members.values())
        return min([version, *(member_version for member in members for member_version in versions_of(member))])

    def get(self, name: str) -> TrajectoryGroup:
        """Return a group, from memory or disk."""
        if name in self._only:
            return self._only[name]
        if name in self._cached:
            return self._cached[name][0]
        assert self._journal is not None
        return self._journal.load(self._keys[name])

    async def fetch(self, names: Sequence[str], fields: Collection[str] | None) -> list[TrajectoryGroup]:
        """Return groups: those in the payload store from there, with at least these fields, the others as :meth:`get`.

        Raises:
            FormatError: A group on disk or a row is damaged.
            PayloadsLost: The store was lost.
        """
        shipped = {name: self._shipped[name] for name in names if name in self._shipped}
        keys = [key for group in shipped.values() for key in group.keys]
        columns_by_key: dict[str, Columns] = {}
        if self._payloads is not None and keys:
            rows = await self._payloads.get(keys, columns_of(fields))
            columns_by_key = dict(zip(keys, rows, strict=True))
        groups = []
        for name in names:
            if name in shipped:
                groups.append(_unpacked(shipped[name], columns_by_key))
            else:
                groups.append(self.get(name))
            # Reading is slow: let rollouts run in between.
            await asyncio.sleep(0)
        return groups

    def take(self, step: int, names: Sequence[str]) -> None:
        """Record that a step is given these groups."""
        keys = [self._keys[name] for name in names if name in self._keys]
        if self._journal is not None and keys:
            self._journal.take(step, keys)
        for name in names:
            # It is read soon: it does not make room for others.
            self._waiting.pop(name, None)

    def drop(self, step: int, name: str, why: str) -> None:
        """Record that a group will not be trained (again), and forget it."""
        if self._journal is not None and name in self._keys:
            self._journal.drop(step, self._keys[name], why)
        self.forget(name)

    def drop_key(self, step: int, key: str, why: str) -> None:
        """Record that a requested group will not be trained."""
        if self._journal is not None:
            self._journal.drop(step, key, why)

    def forget(self, name: str) -> None:
        """Drop a group from memory, and from the payload store with the next group that is shipped there."""
        self._only.pop(name, None)
        if name in self._cached:
            self.cached_bytes -= self._cached.pop(name)[1]
        if (shipped := self._shipped.pop(name, None)) is not None:
            self._waiting.pop(name, None)
            self._cleared += shipped.keys
        key = self._keys.pop(name, None)
        if self._journal is not None and key is not None:
            self._journal.forget(key)

    def _cache(self, name: str, group: TrajectoryGroup) -> None:
        size = memory_bytes(group)
        self._cached[name] = group, size
        self.cached_bytes += size
        while self.cached_bytes > self._budget and self._cached:
            self.cached_bytes -= self._cached.popitem(last=False)[1][1]


_OF_A_MESSAGE = 256
"""Bytes of a message besides its texts."""


def memory_bytes(group: TrajectoryGroup) -> int:
    """Return about how many bytes of memory a group takes: its arrays and its texts."""
    segments = [segment for trajectory in (*group.trajectories, *group.baselines) for segment in trajectory.segments]
    arrays = sum(
        segment.token_ids.nbytes + (0 if segment.logprobs is None else segment.logprobs.nbytes) for segment in segments
    )
    messages = [message for segment in segments for message in segment.messages]
    texts = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
    return arrays + texts + _OF_A_MESSAGE * len(messages)


def _unpacked(shipped: Shipped, columns_by_key: dict[str, Columns]) -> TrajectoryGroup:
    members, baselines = (
        [unpack_trajectory(columns_by_key[key]) for key in keys] for keys in (shipped.members, shipped.baselines)
    )
    return replace(shipped.head, trajectories=members, baselines=baselines)


def versions_of(trajectories: Iterable[Trajectory]) -> Iterator[int]:
    """Yield the weight versions of trained policies' tokens."""
    for trajectory in trajectories:
        for segment in trajectory.segments if not trajectory.frozen else ():
            for version, _, _ in segment.weight_versions:
                yield version


def group_facts(group: TrajectoryGroup, key: str, arrived: int) -> GroupFacts:
    """Return the facts of a group for strategies, over its trained policies only: frozen weights never age."""
    trained = [trajectory for trajectory in group.trajectories if not trajectory.frozen]
    return GroupFacts(
        id=group.id,
        key=key,
        task_id=group.task_id,
        partition=group.partition,
        arrived=arrived,
        oldest_version=min(versions_of(trained), default=None),
        rewards=tuple(value for trajectory in trained if trajectory.error is None for value in trajectory.returns()),
        failed=group.failed,
        sampled_tokens=sum(trajectory.sampled_tokens for trajectory in trained),
        spread=_spread(group),
    )


def _spread(group: TrajectoryGroup) -> dict[str, float]:
    """Return the spread of the members' values by reward, within comparison groups."""
    compared: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for trajectory in group.trajectories:
        if trajectory.error is None and not trajectory.frozen:
            branches = zip(trajectory.branch_rewards(), trajectory.returns(), strict=True)
            compared[trajectory.group_id] += ({**earned, "reward": reward} for earned, reward in branches)
    names = {name for members in compared.values() for member in members for name in member}
    spread = dict.fromkeys(sorted(names), 0.0)
    for members in compared.values():
        for name in names:
            values = [member.get(name, 0.0) for member in members]
            spread[name] = max(spread[name], max(values) - min(values))
    return spread
