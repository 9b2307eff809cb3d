"""The order in which tasks are trained, and where a run stands in it.

Owns: :class:`TaskStream`. Refuses: loading tasks (``tasks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.errors import TrainError
from turnwise.rollout.core import RolloutRequest
from turnwise.seeding import stable_hash
from turnwise.tasks import Task


class TaskStream:
    """Goes through the tasks again and again; each epoch is shuffled anew, by a seed.

    Where it stands is (epoch, position), and the order depends on nothing else: a resumed run takes the task that
    the killed one would have taken.

    Attributes:
        epoch: How often all tasks were taken.
        position: How many of the current epoch were.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool, epoch: int = 0, position: int = 0) -> None:
        if not tasks:
            raise TrainError("tasks holds no task: there is nothing to train on")
        if position > len(tasks):
            raise TrainError(
                f"the checkpoint stands at task {position} of its epoch, but tasks holds {len(tasks)}: "
                "resume with the same tasks, or start a new run"
            )
        self.epoch = epoch
        self.position = position
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._order = self._ordered()

    def take(self, groups: int, group_size: int) -> list[RolloutRequest]:
        """Return the requests of one train step and move on."""
        requests = []
        for _ in range(groups):
            if self.position == len(self._tasks):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._ordered()
            requests.append(RolloutRequest(self._tasks[self._order[self.position]], self.epoch, group_size))
            self.position += 1
        return requests

    def _ordered(self) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._tasks)))
        rng = np.random.default_rng(stable_hash("order", self._seed, self.epoch))
        return [int(index) for index in rng.permutation(len(self._tasks))]
