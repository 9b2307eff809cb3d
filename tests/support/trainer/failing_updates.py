"""Learners and losses whose updates wait or fail, for runs in this process.

Named ``support.trainer.failing_updates:HeldLearner`` in configurations of runs in this process.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import torch

import turnwise
from support.envs.run_envs import Graded
from turnwise.trainer.algorithms.losses import LossSums, ppo_clip_loss
from turnwise.trainer.learn.torch_learner import TorchLearner


@dataclass
class UpdateHold:
    """A hold on one update: it waits until it is opened, and may fail.

    Attributes:
        update: Which one, from 1.
        reached: Set when it begins.
        opened: Lets it continue.
        fails: Raised when it has changed the weights; None raises nothing.
        threads: In which threads updates ran.
    """

    update: int
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    fails: Exception | None = None
    threads: set[int] = field(default_factory=set)


HOLDS: list[UpdateHold] = []


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
        result = super().optim_step()
        if self.steps == hold.update and hold.fails is not None:
            raise hold.fails
        return result


FAILS: list[int] = []
"""The updates of this process that fail, by their number, from 1."""
BEFORE: dict[str, torch.Tensor] = {}
"""The weights before the last update."""
_COUNT = {"update": 0, "call": 0}
_EARNED = itertools.count()


class Fresh(turnwise.Hooks):
    """Counts updates anew in each run."""

    def on_train_begin(self):
        _COUNT["update"] = 0


class Watched(TorchLearner):
    """Keeps the weights that each update begins with."""

    def forward_backward(self, batches, objective, normalizer):
        _COUNT.update(update=_COUNT["update"] + 1, call=0)
        BEFORE.update({name: weight.detach().clone() for name, weight in self.export_weights()})
        return super().forward_backward(batches, objective, normalizer)


def second_call(logprobs, old_logprobs, advantages, weights) -> LossSums:
    """Raise in the second micro-batch of an update that fails: the first has left gradients."""
    _COUNT["call"] += 1
    if _COUNT["update"] in FAILS and _COUNT["call"] == 2:
        raise ValueError(f"the loss of update {_COUNT['update']}")
    return ppo_clip_loss(logprobs, old_logprobs, advantages, weights)


class Ranked(Graded):
    """Pays no two episodes the same: every group teaches something."""

    def score(self, final):
        return next(_EARNED) % 997 / 997
