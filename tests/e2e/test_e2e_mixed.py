"""Groups that are trained again: as often as the run allows, no fresh ones pile up, and a resumed run chooses alike."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from support.trainer.lookup_run import lines, shared, silent, train_config
from turnwise.rollout.audit import audit_files
from turnwise.rollout.records import read_batches
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("mixed-run")]

STEPS = 6
# Three tasks are soon known: the later ones are drawn by their success rates.
MIXED: dict[str, Any] = {
    "steps": STEPS,
    "tasks": "turnwise.envs.basic.lookup:tasks?n=3&split=train",
    "replay": {"strategy": "mixed", "stored_share": 0.5, "max_uses": 2, "keep_groups": 2},
    "curriculum": {"success_reward": 0.5},
}


@pytest.fixture(scope="module")
def mixed(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, and then once more from the checkpoint of the second one."""

    def build(runs: Path) -> None:
        config = train_config(lookup_model, runs, **MIXED)
        run_train(config, console=silent())
        (runs / "first.json").write_text(json.dumps(order_of(runs / "run", STEPS)))
        run_train(config, resume_step=2, console=silent())

    return shared(tmp_path_factory, "mixed", build)


def order_of(run: Path, step: int) -> Any:
    return json.loads((run / "checkpoints" / f"step_{step:06d}" / "trainer_state.json").read_text())["tasks"]


def given(run: Path) -> list[tuple[int, set[str]]]:
    takes = [event for event in lines(run / "journal.jsonl") if event["event"] == "take"]
    return [(event["step"], set(event["keys"])) for event in takes]


def test_mixed_run_passes_the_audit_and_requests_fresh_groups(mixed: Path) -> None:
    run = mixed / "run"
    steps = defaultdict(set)
    for row in read_batches(run / "batches.jsonl").rows:
        steps[row.trajectory].add(row.step)
    assert {len(groups) for groups in steps.values()} == {1, 2}
    # The first step finds no stored group; each later one takes one of them, and one fresh group.
    events = lines(run / "journal.jsonl")
    assert sum(event["event"] == "group" for event in events) == 2 + (STEPS - 1)
    assert audit_run(run, at_most=8, console=silent()).contradictions == []


def test_resumed_run_takes_the_same_groups_and_tasks(mixed: Path) -> None:
    first_pass, second_pass = given(mixed / "run")[:STEPS], given(mixed / "run")[STEPS:]
    assert second_pass == first_pass[2:]
    stored = [step for step, keys in second_pass if any(keys & earlier for at, earlier in first_pass if at < step)]
    assert stored == list(range(3, STEPS + 1)), "each took one that was trained before"
    # What follows in the order of tasks was drawn by the same rates.
    assert order_of(mixed / "run", STEPS) == json.loads((mixed / "first.json").read_text())


def test_journal_with_a_missing_or_corrupt_line_contradicts_the_run(mixed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for file in (*(mixed / "run").glob("*.jsonl"), mixed / "run" / "trajectories.twz"):
        (run / file.name).symlink_to(file)
    journal = run / "journal.jsonl"
    recorded = (mixed / "run" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    [last_take] = [number for number, line in enumerate(recorded) if b'"take"' in line][-1:]
    group = max(number for number, line in enumerate(recorded) if b'"event":"group"' in line)
    named = json.loads(recorded[group])["trajectories"][0][0]
    for changed, message in [
        (
            [*recorded[:last_take], *recorded[last_take + 1 :]],
            f"trained in step {STEPS}, but the journal gave its group to",
        ),
        (
            [line for line in recorded if named.encode() not in line],
            f"trajectory {named}: finished, but the journal has",
        ),
        ([recorded[0], recorded[1][:-9] + b"\n", *recorded[2:]], "journal.jsonl:2: the line is corrupt"),
    ]:
        journal.unlink()
        journal.write_bytes(b"".join(changed))
        assert any(message in text for text in audit_files(run).contradictions), message
