"""A run on a simulated clock: rollouts of random length, lost workers, a slow trainer and restarts.

The buffer, the strategies and the staleness bound are real, and the journal where a run has one; all else is simulated.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from turnwise.rollout.core import BatchRef, GroupFacts, RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.config import StalenessBound
from turnwise.rollout.replay.strategies import Strategy
from turnwise.tasks import Task
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Plan:
    """What happens in a simulated run."""

    seed: int
    groups: int
    parts: int = 1
    steps: int = 12
    longest: float = 8.0
    lost: float = 0.2
    failed: float = 0.1
    kills: int = 2
    save_every: int = 3


@dataclass
class Saved:
    """A checkpoint, and what the journal adds to it."""

    step: int = 0
    position: int = 0
    outstanding: tuple[str, ...] = ()
    trained: Counter[str] = field(default_factory=Counter)


class Simulation:
    """Runs a plan; afterwards it holds what was trained and dropped.

    Args:
        plan: What happens.
        strategy: Chooses.
        admission: How far rollouts run ahead.
        home: Where the run has a journal; None: each process is told again what the others finished.

    Attributes:
        trained: How often each group was trained, in the run as it stands.
        staleness: Of every group that was trained, whether it counts in the end or not.
        dropped: Why groups were dropped, by key.
        asked: Every group that was asked for.
        outstanding: What is neither trained nor dropped.
    """

    def __init__(self, plan: Plan, strategy: Strategy, admission: StalenessBound, home: Path | None = None) -> None:
        self.home, self.part = home, 0
        self.plan, self.strategy, self.admission = plan, strategy, admission
        self.random = random.Random(plan.seed)
        self.now, self.order = 0.0, itertools.count()
        self.trained: Counter[str] = Counter()
        self.staleness: list[int] = []
        self.dropped: dict[str, str] = {}
        self.asked: set[str] = set()
        self.journal: dict[str, TrajectoryGroup] = {}
        self.saved = Saved()
        self.kills = plan.kills
        self._begin()

    def _begin(self) -> None:
        """Start a process: from the last checkpoint, with what the journal holds."""
        self.buffer = LocalReplayBuffer(self.strategy, self._journal())
        self.buffer.refill_by(self._refill)
        self.buffer.drops_to(self._told)
        self.events: list[tuple[float, int, str, str]] = []
        self.step, self.position = self.saved.step, self.saved.position
        self.version = self.step
        self.trained = Counter(self.saved.trained)
        # What was dropped after the checkpoint was dropped by a run that is lost.
        self.dropped = {key: why for key, why in self.dropped.items() if key not in self.saved.outstanding}
        self.dropped = {key: why for key, why in self.dropped.items() if int(key.split("-")[1]) < self.position}
        self.outstanding: dict[str, int] = {}
        self.began: dict[str, int] = {}

    def _journal(self) -> Journal | None:
        if self.home is None:
            return None
        self.part += 1
        return Journal.open(self.home, part=self.part - 1, after_step=self.saved.step)

    async def run(self) -> None:
        """Run to the last step."""
        while True:
            try:
                await self._process()
            except KilledError:
                self._begin()
            else:
                return

    async def _process(self) -> None:
        for key in self.saved.outstanding:
            self._expect(key)
        while self.step < self.plan.steps:
            refs, received = [], 0
            await self._top_up(self.step + 1, received)
            for _ in range(self.plan.parts):
                ref = await self._sample(self.plan.groups // self.plan.parts)
                refs.append(ref)
                received += len(ref.group_ids)
                await self._top_up(self.step + 1, received)
            # The trainer's time: rollouts go on, and are asked for.
            until = self.now + self.random.uniform(0, self.plan.longest)
            await self._top_up(self.step + 2, 0)
            while self.events and self.events[0][0] <= until:
                await self._next()
            self.now = max(self.now, until)
            for ref in refs:
                self._train(ref)
                await self.buffer.release(ref)
            self.step += 1
            self.version = self.step
            if self.step % self.plan.save_every == 0:
                unfinished = tuple(self.outstanding)
                self.saved = Saved(self.step, self.position, unfinished, Counter(self.trained))
            if self.kills and self.random.random() < 0.3:
                self.kills -= 1
                raise KilledError

    async def _sample(self, groups: int) -> BatchRef:
        waiting = asyncio.create_task(self.buffer.sample(self.step + 1, "train", groups))
        await self._settle()
        while not waiting.done():
            assert self.events, f"step {self.step + 1} waits for ever: {self.buffer.ready('train')}"
            await self._next()
        ref, _ = waiting.result()
        for key in ref.group_ids:
            self.outstanding.pop(key, None)
        return ref

    def _train(self, ref: BatchRef) -> None:
        for key in ref.group_ids:
            self.trained[key] += 1
            versions = [
                span[0]
                for trajectory in self.journal[key].trajectories
                for span in trajectory.segments[0].weight_versions
            ]
            self.staleness.append(max(0, self.step - min(versions, default=self.step)))

    async def _top_up(self, step: int, received: int) -> None:
        count = len(self.outstanding)
        for _ in range(self.admission.room(outstanding=count, version=self.version, step=step, taken=received)):
            self._expect(self._key())
        await self._settle()

    def _key(self) -> str:
        self.position += 1
        return f"task-{self.position - 1}"

    def _refill(self, missing: int) -> bool:
        for _ in range(missing):
            self._expect(self._key())
        return True

    def _told(self, facts: GroupFacts, why: str) -> None:
        self.dropped[facts.task_id] = why
        self.outstanding.pop(facts.task_id, None)

    def _expect(self, key: str) -> None:
        self.asked.add(key)
        self.outstanding[key] = self.version
        here = self.buffer.expect(RolloutRequest(Task(key, "?")), self.version)
        self.began[key] = self.version
        if here:
            return
        # What the journal has arrives at once.
        self._later(0.0 if key in self.journal else self._length(), "done", key)

    def _length(self) -> float:
        # Long tails: most are short.
        return self.plan.longest * self.random.random() ** 3 + 0.01

    def _later(self, seconds: float, kind: str, key: str) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), kind, key))

    async def _next(self) -> None:
        self.now, _, kind, key = heapq.heappop(self.events)
        if kind == "done" and key not in self.journal and self.random.random() < self.plan.lost:
            # Its worker is gone: played anew, with the weights of now.
            self.began[key] = self.version
            self._later(self._length(), "done", key)
            return
        if key not in self.journal:
            self.journal[key] = self._group(key)
        await self.buffer.put(self.journal[key])
        await self._settle()

    def _group(self, key: str) -> TrajectoryGroup:
        if self.random.random() < self.plan.failed:
            return TrajectoryGroup(key, key, [], "train", failed=2)
        ids = np.arange(2, dtype=np.int32)
        members = []
        for member in range(2):
            spans = ((self.began[key], 0, 1), (self.version, 1, 2))
            segment = Segment(0, -1, "sampled", ids, weight_versions=spans, logprobs=np.zeros(2, np.float32))
            rewards = [(None, "score", float(self.random.randrange(2)))]
            name = f"{key}/{member}"
            members.append(Trajectory(name, name, key, key, segments=[segment], rewards=rewards))
        return TrajectoryGroup(key, key, members, "train")

    async def _settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)


class KilledError(Exception):
    """The process of a simulated run was killed."""
