"""The synchronous loop: roll out a batch, train on it, sync the weights, again. Strictly on-policy.

Owns: :func:`train_sync`. Refuses: what a step is made of (``steps.py``).
"""

from __future__ import annotations

from turnwise.trainer.loops.steps import finish_step, roll_out, train_on
from turnwise.trainer.run import TrainRun


async def train_sync(run: TrainRun) -> None:
    """Train until the budget is spent: its steps, tokens or time, whichever is first.

    Tasks -> groups of trajectories -> advantages and rows -> packed micro-batches -> loss -> new weights -> server.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    while not run.ended:
        batch = await roll_out(run)
        await train_on(run, batch)
        await finish_step(run)
