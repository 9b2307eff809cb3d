"""The loop that the configuration names.

Owns: :func:`train_as_configured`. Refuses: the loops.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from turnwise.trainer.loops.colocate_async import train_colocate_async
from turnwise.trainer.loops.separate_async import train_separate_async
from turnwise.trainer.loops.sync import train_sync
from turnwise.trainer.modes import Mode
from turnwise.trainer.run import TrainRun

LOOPS: Final[Mapping[Mode, Callable[[TrainRun], Awaitable[None]]]] = {
    "sync": train_sync,
    "colocate_async": train_colocate_async,
    "separate_async": train_separate_async,
}


async def train_as_configured(run: TrainRun) -> None:
    """Train by the loop of ``mode`` until the budget is spent.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    await LOOPS[run.config.mode](run)
