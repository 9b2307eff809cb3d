"""Training rows of random ids, in groups that share their prompt."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from turnwise.trainer.core import TrainRow
from turnwise.trajectory import TrainSample

MEMBERS = 8


def random_rows(groups: int, vocabulary: int, prompt: int, mask: npt.NDArray[np.bool_]) -> list[TrainRow]:
    """Return the rows of a step: those of a group share their prompt and nothing else.

    Args:
        groups: Groups of eight rows.
        vocabulary: Ids are below it.
        prompt: Tokens of a prompt.
        mask: Which ids of a row are trained, of shape [tokens], the prompt's included.
    """
    random = np.random.default_rng(0)
    rows = []
    for group in range(groups):
        shared = random.integers(0, vocabulary, prompt)
        for member in range(MEMBERS):
            ids = np.concatenate([shared, random.integers(0, vocabulary, len(mask) - prompt)])
            sample = TrainSample(
                input_ids=ids.astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, -5.0, 0).astype(np.float32),
                weight_versions=np.where(mask, 0, -1).astype(np.int32),
                turn_ids=np.where(mask, 0, -1).astype(np.int32),
                trajectory_id=f"{group}-{member}",
                group_id=str(group),
                leaf=0,
            )
            rows.append(TrainRow(sample, advantage=1.0 if member % 2 else -1.0))
    return rows
