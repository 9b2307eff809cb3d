"""Store of finished groups: in memory up to a limit, and on disk through the journal."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from turnwise.agents.roles import TRAINED
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.strategies import GroupFacts
from turnwise.trajectory import Trajectory, TrajectoryGroup

_MB = 2**20


class GroupStore:
    """Groups by the id of their facts.

    Args:
        journal: Records groups to train and reads them back; None keeps everything in memory.
        memory_mb: Memory for groups that can be read back, by their size on disk.
    """

    def __init__(self, journal: Journal | None, memory_mb: int) -> None:
        self._journal = journal
        self._budget = memory_mb * _MB
        # What is nowhere else: without a journal everything, and what is evaluated.
        self._only: dict[str, TrajectoryGroup] = {}
        self._keys: dict[str, str] = {}
        self._cached: OrderedDict[str, tuple[TrajectoryGroup, int]] = OrderedDict()
        self.cached_bytes = 0

    def put(self, group: TrajectoryGroup, facts: GroupFacts) -> None:
        """Store a group; one to train is in the journal on return."""
        if self._journal is None or facts.partition != "train":
            self._only[facts.id] = group
            return
        size = self._journal.group(group, facts)
        self._keys[facts.id] = facts.key
        self._cache(facts.id, group, size)

    def restore(self, key: str, arrived: int) -> GroupFacts | None:
        """Return the facts of a group that an earlier process finished, or None."""
        facts = None if self._journal is None else self._journal.facts(key, arrived)
        if facts is not None:
            self._keys[facts.id] = key
        return facts

    def reusable(self, most: int) -> list[GroupFacts]:
        """Return the facts of up to ``most`` groups that may be trained again, least recently trained first."""
        found = [] if self._journal is None else list(self._journal.reusable)
        kept = found[max(0, len(found) - most) :]
        self._keys |= {facts.id: facts.key for facts in kept}
        return kept

    @property
    def next_step(self) -> int:
        """The step that a run begins or resumes with."""
        return 1 if self._journal is None else self._journal.next_step

    def begun_by(self, key: str, version: int) -> int:
        """Return the oldest weights of members from earlier processes, at most ``version``."""
        found = None if self._journal is None else self._journal.found(key)
        members = [] if found is None else list(found.members.values())
        return min([version, *(each for member in members for each in versions_of(member))])

    def get(self, name: str) -> TrajectoryGroup:
        """Return a group, from memory or disk."""
        if name in self._only:
            return self._only[name]
        if name in self._cached:
            return self._cached[name][0]
        assert self._journal is not None
        group, _ = self._journal.load(self._keys[name])
        return group

    def take(self, step: int, names: Sequence[str]) -> None:
        """Record that a step is given these groups."""
        keys = [self._keys[name] for name in names if name in self._keys]
        if self._journal is not None and keys:
            self._journal.take(step, keys)

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
        """Drop a group from memory."""
        self._only.pop(name, None)
        if name in self._cached:
            self.cached_bytes -= self._cached.pop(name)[1]
        key = self._keys.pop(name, None)
        if self._journal is not None and key is not None:
            self._journal.forget(key)

    def _cache(self, name: str, group: TrajectoryGroup, size: int) -> None:
        self._cached[name] = group, size
        self.cached_bytes += size
        while self.cached_bytes > self._budget and self._cached:
            self.cached_bytes -= self._cached.popitem(last=False)[1][1]


def versions_of(trajectories: Iterable[Trajectory]) -> Iterator[int]:
    """Yield the weight versions of trained policies' tokens."""
    for trajectory in trajectories:
        for segment in trajectory.segments if trajectory.policy == TRAINED else ():
            for version, _, _ in segment.weight_versions:
                yield version
