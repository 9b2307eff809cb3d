"""What the parts of a train step, trained one after the other, say together.

Owns: :func:`combined`, :func:`shares` and :func:`lags`, pure functions. Refuses: training (``steps.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from turnwise.trainer.packing import TrainRow

_SUMS = (
    "batch/",
    "dropped/",
    "straggler/cut_groups",
    "straggler/wait_s",
    "straggler/cancelled",
    "rollout/cancelled_episodes",
    "rollout/wasted_tokens",
    "replay/dropped/",
    "replay/failed",
    "replay/reissued",
    "replay/reused",
    "replay/short",
    "replay/wait_s",
    "train/tokens",
    "train/updates",
    "train/skipped_updates",
    "train/non_finite_updates",
)
_SUMS_TOO = ("distill/unscored_tokens",)
_LAST = ("lr/", "critic/lr", "kl/coef", "replay/ready", "replay/in_flight", "straggler/carried")
_OF_TOKENS = ("train/", "lag/", "critic/", "correction/", "kl/", "distill/")


def shares(groups: int, parts: int) -> list[int]:
    """Return how many groups each part of a batch has: as equal as can be, the larger ones first."""
    whole, over = divmod(groups, parts)
    return [whole + (number < over) for number in range(parts)]


def combined(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step from those of its parts.

    Counts are added, the largest of maxima counts, the last of rates and of what is left, the first of gaps. All else
    are means: what concerns tokens weighted by the trained tokens of the parts that have it, the rest by their
    trajectories.

    Args:
        parts: In the order in which they were trained; one alone is the step's.
    """
    if len(parts) == 1:
        return dict(parts[0])
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if name.startswith("gap/"):
            # Later parts are trained by other weights than those that the step began with.
            found[name] = values[0]
        elif name.startswith(_SUMS) or name in _SUMS_TOO:
            found[name] = sum(values)
        elif name.endswith(("_max", "/max")):
            found[name] = max(values)
        elif name.startswith(_LAST):
            found[name] = values[-1]
        else:
            by = "batch/trained_tokens" if name.startswith(_OF_TOKENS) else "batch/trajectories"
            weights = [part.get(by, 0.0) for part in having]
            total = sum(weights)
            pairs = zip(values, weights, strict=True)
            found[name] = sum(value * weight for value, weight in pairs) / total if total else values[-1]
    return found


def lags(rows: Sequence[TrainRow], step: int) -> dict[str, float]:
    """Return by how many versions the weights that are trained are ahead of those that sampled: mean and largest.

    Args:
        rows: What is trained.
        step: The train step; it begins with the weights of version ``step - 1``.
    """
    versions = [row.sample.weight_versions[row.sample.loss_mask] for row in rows]
    if not any(len(each) for each in versions):
        return {}
    found = step - 1 - np.concatenate(versions)
    return {"lag/mean": float(found.mean()), "lag/max": float(found.max())}
