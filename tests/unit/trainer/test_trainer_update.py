"""The optimizer steps of a train step: which old log-probabilities reach the loss, with which rows and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig, ScheduleConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, TrainRow
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import minibatches, update_policy

Row = Callable[..., TrainRow]
Models = Callable[..., Path]
Key = tuple[int, ...]


class Watched:
    """A learner that notes what it is given."""

    def __init__(self, path: Path) -> None:
        config = PolicyConfig(
            model=ModelConfig(path=path, device="cpu"), optim=OptimConfig(lr=0.01), schedule=ScheduleConfig()
        )
        self.learner = TorchLearner.create(config, 100)
        self.steps: list[tuple[list[MicroBatch], float]] = []
        self.recomputed = 0

    def forward_backward(self, batches, objective, normalizer):
        self.steps.append((list(batches), normalizer))
        return self.learner.forward_backward(batches, objective, normalizer)

    def logprobs(self, batches):
        self.recomputed += 1
        return self.learner.logprobs(batches)

    def optim_step(self):
        return self.learner.optim_step()


def by_row(batch: MicroBatch, values: torch.Tensor) -> Iterator[tuple[Key, torch.Tensor]]:
    """Values of shape [N] cut into rows, each named by its ids."""
    for number, (start, length, _) in enumerate(batch.segments):
        yield tuple(batch.input_ids[0, start : start + length].tolist()), values[batch.sequences == number]


@pytest.fixture
def rows(row: Row) -> list[TrainRow]:
    # Lengths that first-fit lays down in another order; one trajectory has two leaves.
    lengths = (5, 17, 9, 12, 7, 15)
    names = ("a", "b", "b", "c", "d", "e")
    return [
        row(length, 2 + n % 3, seed=n, name=name, leaf=n, advantage=(-1.0) ** n)
        for n, (length, name) in enumerate(zip(lengths, names, strict=True))
    ]


def update(watched: Watched, rows: list[TrainRow], **algorithm: object) -> dict[str, float]:
    config = AlgorithmConfig.model_validate(algorithm)
    # Rows are laid whole, so that their ids name them in what is watched.
    batch = BatchConfig(max_tokens_per_micro_batch=32, share_prefixes=False)
    return update_policy(watched, rows, config, batch, seed=3)  # type: ignore[arg-type]


def test_recomputed_logprobs_are_those_before_the_first_step_row_by_row(model_dir: Models, rows) -> None:
    watched = Watched(model_dir())
    expected: dict[Key, torch.Tensor] = {}
    for row in rows:
        [batch] = pack([row], 100)
        [scores] = watched.learner.logprobs([batch])
        expected[tuple(row.sample.input_ids.tolist())] = scores
    metrics = update(watched, rows, old_logprobs="recompute", epochs=2, minibatches=2)
    assert len(watched.steps) == 4
    seen = 0
    for batches, _ in watched.steps:
        for batch in batches:
            assert batch.old_logprobs is not None
            for key, values in by_row(batch, batch.old_logprobs):
                torch.testing.assert_close(values, expected[key], atol=1e-5, rtol=0)
                seen += 1
    assert seen == 2 * len(rows)
    # The weights moved under them: the ratio is not 1 any more.
    assert watched.recomputed == 1
    assert metrics["train/ratio_max"] > 1.01


def test_rollout_logprobs_are_used_as_they_were_recorded(model_dir: Models, rows) -> None:
    watched = Watched(model_dir())
    update(watched, rows, old_logprobs="rollout")
    recorded = {
        tuple(row.sample.input_ids.tolist()): torch.from_numpy(row.sample.rollout_logprobs[row.sample.loss_mask])
        for row in rows
    }
    [(batches, normalizer)] = watched.steps
    assert normalizer == sum(row.sample.trained_tokens for row in rows)
    old_of = {key: values for batch in batches for key, values in by_row(batch, batch.old_logprobs)}
    assert old_of.keys() == recorded.keys()
    assert all(torch.equal(old_of[key], recorded[key]) for key in old_of)
    assert watched.recomputed == 0


def test_a_single_update_recomputes_no_logprobs(model_dir: Models, rows) -> None:
    watched = Watched(model_dir())
    update(watched, rows, old_logprobs="recompute")
    [(batches, _)] = watched.steps
    assert watched.recomputed == 0
    assert all(batch.old_logprobs is None for batch in batches)


def test_epochs_cover_every_row_once_in_new_minibatches(model_dir: Models, rows) -> None:
    watched = Watched(model_dir())
    update(watched, rows, epochs=4, minibatches=2)
    parts = [
        frozenset(key for batch in batches for key, _ in by_row(batch, batch.target_ids))
        for batches, _ in watched.steps
    ]
    everything = {tuple(row.sample.input_ids.tolist()) for row in rows}
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert first | second == everything
        assert not first & second
        ids = {tuple(row.sample.input_ids.tolist()) for row in rows if row.sample.trajectory_id == "b"}
        assert ids <= first or ids <= second
    assert len({frozenset(pair) for pair in zip(parts[::2], parts[1::2], strict=True)}) > 1
    # Each step has the normaliser of its own rows.
    trained = {tuple(row.sample.input_ids.tolist()): row.sample.trained_tokens for row in rows}
    for (_, normalizer), part in zip(watched.steps, parts, strict=True):
        assert normalizer == sum(trained[key] for key in part)


def test_a_step_without_rows_keeps_the_weights(model_dir: Models) -> None:
    watched = Watched(model_dir())
    initial = [parameter.clone() for parameter in watched.learner.policy.model.parameters()]
    update(watched, [])
    updated = watched.learner.policy.model.parameters()
    assert all(torch.equal(old, new) for old, new in zip(initial, updated, strict=True))


def test_minibatches_keep_trajectories_whole(row: Callable[..., TrainRow]) -> None:
    rows = [row(4, name=f"t{n % 5}", leaf=n) for n in range(12)]
    parts = minibatches(rows, 3, seed=1)
    assert len(parts) == 3
    homes: dict[str, set[int]] = {}
    for number, part in enumerate(parts):
        for train_row in part:
            homes.setdefault(train_row.sample.trajectory_id, set()).add(number)
    assert all(len(parts_of) == 1 for parts_of in homes.values())
    leaves = [[row.sample.leaf for row in part] for part in parts]
    assert sorted(leaf for part in leaves for leaf in part) == list(range(12))
    assert [[row.sample.leaf for row in part] for part in minibatches(rows, 3, seed=1)] == leaves
    assert minibatches(rows, 1, seed=9) == [rows]
    # More parts than trajectories: no part is empty.
    assert len(minibatches(rows, 50, seed=0)) == 5
