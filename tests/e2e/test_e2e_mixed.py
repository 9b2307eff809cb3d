"""Groups that are trained again: as often as the run allows, and no fresh ones pile up."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from support.lookup_run import lines, silent, train_config
from turnwise.rollout.batches import read_batches
from turnwise.trainer.audit import audit_run
from turnwise.trainer.train import train


async def test_a_mixed_run_is_sound_and_asks_for_what_it_takes(lookup_model: Path, tmp_path: Path) -> None:
    replay = {"strategy": "mixed", "stored_share": 0.5, "max_uses": 2}
    await train(train_config(lookup_model, tmp_path, replay=replay, steps=4), console=silent())
    run = tmp_path / "run"
    steps = defaultdict(set)
    for row in read_batches(run / "batches.jsonl").rows:
        steps[row.trajectory].add(row.step)
    assert {len(each) for each in steps.values()} == {1, 2}
    # The first step finds no stored group; each later one takes one of them, and one fresh group.
    events = lines(run / "journal.jsonl")
    assert sum(each["event"] == "group" for each in events) == 2 + 3
    assert audit_run(run, at_most=8, console=silent()).contradictions == []
