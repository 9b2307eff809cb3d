"""A loss that raises in the middle of an update, and what its runs need besides.

Named ``support.failing_loss:...`` in configurations of runs in this process.
"""

from __future__ import annotations

import itertools

import torch

import turnwise
from support.lookup_envs import Graded
from turnwise.trainer.algorithms.losses import LossSums, ppo_clip_loss
from turnwise.trainer.learn.torch_learner import TorchLearner

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
