"""A step of several parts that ends with those that are trained, because the next one was cut off or failed.

Owns: :class:`Trained` and :func:`give_back`. Refuses: telling whether the weights are those of the parts before
(``TrainRun.torn``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from turnwise.trainer.run import TrainRun


@dataclass(frozen=True, slots=True)
class Trained:
    """How far the step that is made is trained.

    Attributes:
        step: The step.
        groups: How many groups of those that it was given.
        records: How many records of what this process trained stand in ``batches.jsonl``.
        sampled_tokens: What the run had spent of them.
    """

    step: int
    groups: int
    records: int
    sampled_tokens: float

    @classmethod
    def now(cls, run: TrainRun) -> Self:
        """Return how far it is where everything that it was given is trained."""
        step = run.state.step + 1
        groups = len(run.journal.given) if run.journal.given_to == step else 0
        return cls(step, groups, run.batches.records, run.budget.spent.get("sampled_tokens", 0.0))


def give_back(run: TrainRun, trained: Trained) -> None:
    """Give back what a step was given and did not train, as if it had not been asked for yet.

    Args:
        run: The run; its weights are those of the parts that are trained.
        trained: How far they reach.

    Raises:
        DiskError: The disk refuses; nothing may be saved then.
    """
    kept, keys = run.journal.given[: trained.groups], run.journal.given[trained.groups :]
    if keys:
        run.journal.take(trained.step, keys, back=True)
    run.batches.undo(trained.step, run.batches.records - trained.records)
    # A stored group that an earlier part of the step trained is on its way no more.
    run.feed.take_back(set(keys).difference(kept))
    run.budget.spend(sampled_tokens=trained.sampled_tokens - run.budget.spent.get("sampled_tokens", 0.0))
