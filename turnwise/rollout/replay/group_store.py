"""Store of finished groups: in memory up to a limit, and on disk through the journal."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from turnwise.rollout.core import GroupFacts
from turnwise.rollout.journal.journal import Journal
from turnwise.trajectory import Trajectory, TrajectoryGroup

_MB = 2**20


class GroupStore:
    """Groups by the id of their facts.

    Args:
        journal: Records groups to train and reads them back; None keeps everything in memory.
        memory_mb: Memory for groups that can be read back, by :func:`memory_bytes`.
    """

    def __init__(self, journal: Journal | None, memory_mb: int) -> None:
        self._journal = journal
        self._budget = memory_mb * _MB
        # What is in no journal: without one everything.
        self._only: dict[str, TrajectoryGroup] = {}
        self._keys: dict[str, str] = {}
        self._cached: OrderedDict[str, tuple[TrajectoryGroup, int]] = OrderedDict()
        self.cached_bytes = 0

    def put(self, group: TrajectoryGroup, facts: GroupFacts) -> None:
        """Store a group; one to train is in the journal on return."""
        if self._journal is not None and facts.partition == "train":
            self._journal.group(group, facts)
            self._keys[facts.id] = facts.key
            self._cache(facts.id, group)
        else:
            self._only[facts.id] = group

    def restore(self, key: str, arrived: int) -> GroupFacts | None:
        """Return the facts of a group that an earlier process finished, or None."""
        facts = None if self._journal is None else self._journal.facts(key, arrived)
        if facts is not None:
            self._keys[facts.id] = key
        return facts

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

    def take(self, step: int, names: Sequence[str]) -> None:
        """Record that a step is given these groups."""
        keys = [self._keys[name] for name in names if name in self._keys]
        if self._journal is not None and keys:
            self._journal.take(step, keys)

    def drop(self, step: int, name: str, why: str) -> None:
        """Record that a group will not be trained, and forget it."""
        if self._journal is not None and name in self._keys:
            self._journal.drop(step, self._keys[name], why)
        self.forget(name)

    def drop_key(self, step: int, key: str, why: str) -> None:
        """Record that a requested group will not be trained."""
        if self._journal is not None:
            self._journal.drop(step, key, why)

    def forget(self, name: str) -> None:
        """Drop a group from memory."""
        self._only.pop(name, None)
        if name in self._cached:
            self.cached_bytes -= self._cached.pop(name)[1]
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
