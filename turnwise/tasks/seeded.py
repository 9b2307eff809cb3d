"""Tasks for environments that draw everything from the seed of their reset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from turnwise.errors import TaskError, shown
from turnwise.seeding import stable_hash
from turnwise.tasks import Task

FIXED_HASHES: Final[Mapping[str, str]] = {"PYTHONHASHSEED": "0"}
"""Environment of sandboxes in which Python's sets have one order, and hashes one value."""
SPLITS: Final = ("train", "test")
"""The splits of drawn tasks, which have nothing in common."""


def check_split(env: str, split: object) -> None:
    """Raise TaskError for a split that the drawn tasks of an environment do not have."""
    if split not in SPLITS:
        raise TaskError(f"{env} has no split {shown(split)}: {', '.join(SPLITS)}")


def in_split(split: str, *key: str | int) -> bool:
    """Whether a key of draws is of a split: about a quarter of all is of ``test``."""
    return (stable_hash(*key) % 4 == 0) == (split == "test")


def source(n: int, name: str) -> str:
    """Return the reference of :func:`tasks` with these arguments."""
    return f"{__name__}:tasks?n={n}&name={name}"


def tasks(n: int = 1000, *, name: str = "train") -> Iterator[Task]:
    """Yield ``n`` tasks without a prompt.

    Args:
        n: Number of tasks.
        name: Prefix of the ids, which determines the seeds: ``train`` to train on, ``test`` held out.
    """
    if n < 1 or not name:
        raise TaskError(f"seeded tasks: n={n!r}, name={name!r}: n must be at least 1, and name a non-empty string")
    for index in range(n):
        yield Task(f"{name}-{index}", "")
