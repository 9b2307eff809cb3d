"""A rank of the engine fsdp dies in the middle of an update: the run resumes, on other ranks if it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.crash.checks import left_on_disk, prove
from support.processes.warm import WarmPopen
from support.trainer.lookup_run import silent, train_config
from turnwise.errors import RankDied
from turnwise.trainer.learn.rank_processes import RankProcesses
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.directory import CHECKPOINTS
from turnwise.trainer.run.train import train


@pytest.mark.long
async def test_a_run_whose_rank_is_killed_resumes_with_nothing_lost_or_trained_twice(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankProcesses, "launcher", WarmPopen)
    run = tmp_path / "run"
    changes = {
        "steps": 5,
        "checkpoint": {"every": 2},
        "algorithm": {"loss": "support.trainer.ranks:fatal", "loss_options": {"run": str(run), "steps": 3}},
        "batch": {"max_tokens_per_micro_batch": 64, "share_prefixes": False},
        # Each share of what they have.
        "policies": {"main": {"engine": "fsdp", "model": {"threads": None}}},
    }
    with pytest.raises(RankDied, match=r"rank 1 of 2 .* died \(signal 9\) in forward_backward: the same command"):
        await train(train_config(lookup_model, tmp_path, **changes), console=silent())
    # What the third step learned was on the ranks alone.
    store = CheckpointStore(run / CHECKPOINTS)
    assert store.steps() == [2]
    left = left_on_disk(run)

    changes["policies"]["main"]["engine_options"] = {"ranks": 1}
    summary = await train(train_config(lookup_model, tmp_path, **changes), console=silent())
    assert summary.steps == 5
    proof = prove(run, [left])
    assert proof.steps == 5
    assert proof.redone > 0
    assert store.steps() == [2, 4, 5]
