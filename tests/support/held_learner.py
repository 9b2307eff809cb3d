"""A learner whose update waits, so that a test can do something meanwhile, or that fails.

Named ``support.held_learner:HeldLearner`` in configurations of runs in this process.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from turnwise.trainer.learn.torch_learner import TorchLearner


@dataclass
class ResponseFormat:
    """One update that waits.

    Attributes:
        update: Which one, from 1.
        reached: Set when it begins.
        opened: Lets it go on.
        fails: Raised when it has changed the weights, where there is one.
        threads: In which threads updates ran.
    """

    update: int
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    fails: Exception | None = None
    threads: set[int] = field(default_factory=set)


HOLDS: list[ResponseFormat] = []


class HeldLearner(TorchLearner):
    """Waits at the start of the update that the one hold of this process names."""

    def forward_backward(self, batches, objective, normalizer):
        [hold] = HOLDS
        hold.threads.add(threading.get_ident())
        if self.steps + 1 == hold.update:
            hold.reached.set()
            assert hold.opened.wait(60)
        return super().forward_backward(batches, objective, normalizer)

    def optim_step(self):
        [hold] = HOLDS
        found = super().optim_step()
        if self.steps == hold.update and hold.fails is not None:
            raise hold.fails
        return found
