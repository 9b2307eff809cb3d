"""What a person sees of a training run.

Owns: :data:`COLUMNS` and :func:`run_display`. Refuses: drawing (``loggers/console.py``).
"""

from __future__ import annotations

from rich.console import Console

from turnwise.trainer.budget import Budget
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.loggers.console import LiveDisplay

COLUMNS = {
    "reward": "reward/mean",
    "informative": "reward/informative",
    "turns": "rollout/turns",
    "success": "eval/sampled",
    "greedy": "eval/greedy",
    "tok/s": "time/sampled_tokens_per_s",
    "gap": "gap/max",
    "s": "time/step_s",
}
"""Heading and metric of each column."""


def run_display(config: TrainConfig, budget: Budget, done: int, console: Console) -> LiveDisplay:
    """Make the display of a run.

    Args:
        config: What was asked for.
        budget: How far the run is.
        done: Steps that were done before this process.
        console: Where it goes.
    """
    share = budget.nearest[1]
    return LiveDisplay(config.name, config.steps, COLUMNS, curve="reward/mean", console=console, done=done, begun=share)
