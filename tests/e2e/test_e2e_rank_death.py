"""Ranks of the engine fsdp die in an update, a weight sync and a checkpoint: the run resumes each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.crash.checks import Left, left_on_disk, prove
from support.processes.warm import WarmPopen
from support.trainer.lookup_run import silent, train_config
from support.trainer.ranks import DEATHS
from turnwise.errors import RankDied
from turnwise.trainer.learn.rank_processes import RankProcesses
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.directory import CHECKPOINTS
from turnwise.trainer.train import train


@pytest.mark.long
async def test_a_run_whose_ranks_are_killed_resumes_with_nothing_lost_or_trained_twice(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankProcesses, "launcher", WarmPopen)
    run, deaths = tmp_path / "run", tmp_path / "deaths"
    changes = {
        "steps": 5,
        "checkpoint": {"every": 2},
        "algorithm": {"loss": "support.trainer.ranks:fatal", "loss_options": {"deaths": str(deaths)}},
        "batch": {"max_tokens_per_micro_batch": 64, "share_prefixes": False},
        # Each share of what they have.
        "policies": {"main": {"engine": "fsdp", "model": {"threads": None}}},
    }
    store = CheckpointStore(run / CHECKPOINTS)
    lives: list[Left] = []
    for number, call in enumerate(DEATHS, start=1):
        with pytest.raises(RankDied, match=rf"rank 1 of 2 .* died \(signal 9\) in {call}: the same command"):
            await train(train_config(lookup_model, tmp_path, **changes), console=silent())
        assert deaths.read_text().split() == list(DEATHS[:number])
        # What the third step learned was on the ranks alone.
        assert store.steps() == [2]
        lives.append(left_on_disk(run))

    changes["policies"]["main"]["engine_options"] = {"ranks": 2, "sequence_parallel": 2}
    summary = await train(train_config(lookup_model, tmp_path, **changes), console=silent())
    assert summary.steps == 5
    proof = prove(run, lives)
    assert proof.steps == 5
    assert proof.redone > 0
    assert store.steps() == [2, 4, 5]
