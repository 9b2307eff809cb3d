"""A run over a mix of sources, one of them streamed: what it took, what it says of each, and going on after its end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.trainer.lookup_run import GROUPS, lines, silent, train_config
from turnwise.trainer.train import run_train
from turnwise.trajectory_file import read_trajectories


def mix(folder: Path) -> list[dict[str, Any]]:
    """Two files of lookup tasks: one held, of which a row is too long, and one streamed."""
    for name in ("held", "streamed"):
        people = ["ana", "ben", "cleo", "dan", "eva", "finn", "gus", "hana"]
        rows = [{"id": f"{name}-{n}", "prompt": "?", "person": person} for n, person in enumerate(people)]
        rows[0]["prompt"] = "many words " * 200
        for row in rows:
            row["split"] = "train"
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        {"source": str(folder / "held.jsonl"), "env": {"name": "support.envs.run_envs:Graded"}},
        {"source": str(folder / "streamed.jsonl"), "stream": True},
    ]


def taken(run: Path) -> list[tuple[str, str]]:
    """The tasks of each group, in the order in which they were taken; a group's id says the epoch."""
    groups = {trajectory.group_id: trajectory.task_id for trajectory in read_trajectories(run / "trajectories.twz")}
    return sorted((task, group.rpartition("-e")[2]) for group, task in groups.items())


@pytest.mark.long
def test_mix_is_trained_by_its_shares_and_resumes(lookup_model: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"tasks": mix(tmp_path), "max_prompt_tokens": 1000}
    (tmp_path / "two").mkdir()
    for steps in (1, 3):
        run_train(train_config(lookup_model, tmp_path / "two", steps=steps, **changes), console=silent())
    run_train(train_config(lookup_model, tmp_path / "one", steps=3, **changes), console=silent())

    assert taken(tmp_path / "two/run") == taken(tmp_path / "one/run")
    assert Counter(task.partition("-")[0] for task, _ in taken(tmp_path / "one/run")) == {
        "held": 3 * GROUPS / 2,
        "streamed": 3 * GROUPS / 2,
    }
    states = [
        json.loads((tmp_path / name / "run/checkpoints/step_000003/trainer_state.json").read_text())
        for name in ("one", "two")
    ]
    assert states[0]["tasks"] == states[1]["tasks"]
    assert (states[0]["epoch"], states[0]["position"]) == (0, 3 * GROUPS)
    assert {name: source["taken"] for name, source in states[0]["tasks"]["sources"].items()} == {
        "held": 3,
        "streamed": 3,
    }

    logged = [record for record in lines(tmp_path / "two/run/metrics.jsonl") if record["kind"] == "train"]
    assert len(logged) == 3
    for record in logged:
        assert 0.0 <= record["reward/by_source/held"] <= 1.0
        assert 0.0 <= record["reward/by_source/streamed"] <= 1.0
        assert record["tasks/left_out"] == 2.0
