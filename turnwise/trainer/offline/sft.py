"""``turnwise sft``: supervised fine-tuning on demonstrations, or on recorded trajectories (rejection sampling)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.console import Console

from turnwise.errors import TrainError
from turnwise.model.core import Renderer
from turnwise.trainer.algorithms.losses.core import weigh
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import Learner, open_learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective
from turnwise.trainer.offline.core import (
    Batch,
    OfflineResult,
    filter_trajectories,
    locked_directory,
    print_notice,
    read_recorded,
    shuffled,
    train_offline,
)
from turnwise.trainer.offline.demonstrations import demonstration_rows, load_demonstrations
from turnwise.trajectory import to_samples

_COLUMNS = {
    "loss": "train/nll",
    "held out": "held_out/nll",
    "grad": "train/grad_norm",
    "trained tokens": "train/tokens",
    "tok/s": "time/tokens_per_s",
}


def run_sft(config: SFTConfig, *, console: Console | None = None) -> OfflineResult:
    """Fine-tune a model and save it to ``runs/name/model``.

    Raises:
        TaskError: The data cannot be read or rendered in the model's chat format, or has nothing to learn from.
        TrainError: The model cannot be loaded or trained, or a model of this name exists.
    """
    with locked_directory(config, console):
        renderer = config.renderer.load(config.model.path)
        rows, cut = _rows(config, renderer, console)
        rows = [group for group in rows if group]
        if not rows:
            raise TrainError("no conversation of the data has an assistant token within max_tokens_per_row")
        if cut:
            print_notice(console, f"max_tokens_per_row {config.max_tokens_per_row} cuts {cut} assistant tokens off")
        steps = config.steps_over(len(rows), config.conversations)
        learner = open_learner(config.policy, steps)
        objective = CrossEntropyObjective()

        def make(indices: list[int]) -> Batch:
            batch_rows = [row for index in indices for row in rows[index]]
            weighed, normalizer = weigh(batch_rows, config.loss_aggregation, scale=config.loss_scale)
            packed = pack(weighed, config.max_tokens_per_micro_batch, share_prefixes=config.share_prefixes)
            return Batch(packed, objective, normalizer)

        batches = map(make, shuffled(len(rows), config.conversations, config.seed))
        evaluate = None if config.held_out is None else _held_out_loss(config, renderer, learner)
        return train_offline(config, learner, batches, "sft", _COLUMNS, console, renderer, evaluate)


def _held_out_loss(config: SFTConfig, renderer: Renderer, learner: Learner) -> Callable[[], dict[str, float]]:
    """Return what computes the mean negative log-likelihood of held-out assistant tokens."""
    assert config.held_out is not None, "read where it is given"
    demonstrations = load_demonstrations(config.held_out)
    groups, _ = asyncio.run(demonstration_rows(demonstrations, renderer, config.max_tokens_per_row))
    rows = [row for group in groups for row in group]
    if not rows:
        raise TrainError(f"held_out is {config.held_out}: no conversation has an assistant token to predict")
    micro = pack(rows, config.max_tokens_per_micro_batch, share_prefixes=config.share_prefixes)
    tokens = sum(batch.trained_tokens for batch in micro)
    return lambda: {"held_out/nll": -sum(float(logprobs.sum()) for logprobs in learner.logprobs(micro)) / tokens}


def _rows(config: SFTConfig, renderer: Renderer, console: Console | None) -> tuple[list[list[TrainRow]], int]:
    if config.trajectories is None:
        assert config.data is not None, "a configuration has data or trajectories"
        demonstrations = load_demonstrations(config.data, config.limit)
        return asyncio.run(demonstration_rows(demonstrations, renderer, config.max_tokens_per_row))
    recorded = read_recorded(config.trajectories, renderer)
    selected = filter_trajectories(recorded, config.trajectories)[: config.limit]
    tasks = len({trajectory.task_id for trajectory in selected})
    print_notice(console, f"trajectories: {len(selected)} of {len(recorded)} are trained, of {tasks} tasks")
    samples = [to_samples(trajectory, max_tokens=config.max_tokens_per_row) for trajectory in selected]
    unowned_tokens = sum(sample.unowned_tokens for sample in samples)
    return [[TrainRow(row) for row in sample.rows] for sample in samples], unowned_tokens
