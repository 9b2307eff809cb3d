"""Hooks and replay buffers that configurations of test runs name.

Named ``support.trainer.hooks_and_buffers:Class`` in configurations.
"""

from __future__ import annotations

import threading
from pathlib import Path

import turnwise

THREADS: set[str] = set()
"""In which threads :class:`Newest` was asked."""


class Newest(turnwise.LocalReplayBuffer):
    """Takes the newest groups that are young enough, and discards those that are too old."""

    def __init__(self, bound: int, **inherited):
        super().__init__(**inherited)
        self.bound = bound

    def sample(self, global_steps, partition_id, batch_size):
        THREADS.add(threading.current_thread().name)
        while True:
            ready = self.ready(partition_id)
            old = [facts for facts in ready if facts.staleness(global_steps) > self.bound]
            self.discard([facts.key for facts in old], "old")
            young = sorted((facts for facts in ready if facts not in old), key=lambda facts: -facts.arrived)
            if len(young) >= batch_size:
                ref, metrics = self.take([facts.id for facts in young[:batch_size]], global_steps)
                return ref, {**metrics, "replay/newest": float(young[0].arrived)}
            self.wait()


class Stumbling(turnwise.LocalReplayBuffer):
    """Raises once, after it took its ``at``-th batch; the file ``done`` says which groups these were."""

    def __init__(self, at: int, done: str, **inherited):
        super().__init__(**inherited)
        self.left, self.done = at, Path(done)

    async def sample(self, global_steps, partition_id, batch_size):
        ref, metrics = await super().sample(global_steps, partition_id, batch_size)
        self.left -= 1
        if self.left == 0 and not self.done.exists():
            self.done.write_text("\n".join(ref.keys))
            raise RuntimeError("not this time")
        return ref, metrics


class OverSampling(turnwise.Hooks):
    """One more group is on its way than a batch has."""

    def on_step_begin(self):
        self.request(1)


FAILURES: list[int] = []
"""At which samplings of the runs of this process it fails; each counts down to one of them."""
GIVEN: list[tuple[int, tuple[str, ...]]] = []
"""What steps were given: the step, and its tasks' groups."""


class FailsOnce(turnwise.Hooks):
    """Notes what it is given, and raises where ``FAILURES`` names it."""

    def on_sample_end(self):
        GIVEN.append((self.global_steps, tuple(group.id.partition("-")[2] for group in self.batch)))
        if len(GIVEN) in FAILURES:
            raise RuntimeError("not this time")


class Ended(turnwise.Hooks):
    """Adds a line to ``ended.txt`` beside the run's directory: after which step, and by what."""

    def on_train_end(self):
        with (self.config.runs / "ended.txt").open("a") as file:
            file.write(f"{self.global_steps} {type(self.error).__name__}\n")
