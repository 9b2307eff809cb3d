"""Steps and scores of learners with adapters, as their tests take them."""

from __future__ import annotations

from typing import Any

import torch

from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import Learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective


def trained(learner: Learner, rows: list[TrainRow], steps: int = 2) -> Learner:
    """Return the learner after steps of cross-entropy on the rows."""
    for _ in range(steps):
        learner.forward_backward(pack(rows, 40), CrossEntropyObjective(), 20.0)
        learner.optim_step()
    return learner


def logprobs(learner: Any, rows: list[TrainRow]) -> torch.Tensor:
    """Return the log-probabilities of the rows' trained tokens, one after the other."""
    return torch.cat(learner.logprobs(pack(rows, 1000)))
