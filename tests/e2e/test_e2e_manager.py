"""The rollout manager of ``examples/extensions`` trains ``lookup``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.rollout.custom_managers import EXAMPLE
from support.trainer.lookup_run import GROUPS, MEMBERS, environment, lines, silent, take_warm, train_config
from turnwise.errors import TrainError
from turnwise.rollout.records import read_batches
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory_file import read_trajectories

MAIN = Path(__file__).parents[2] / "examples" / "lookup" / "main.py"
EVAL = {"tasks": "turnwise.envs.basic.lookup:tasks?n=3&split=test", "samples": 2, "greedy": True, "every": None}


# Greedy rollouts beside the groups, which a manager has to see to, and a penalty that it need not know of.
ALGORITHM = {"advantage": "remax", "kl": {"coef": 0.05, "estimator": "k2", "where": "reward"}}


@pytest.mark.long
def test_custom_manager_trains_as_the_built_in_manager(lookup_model: Path, tmp_path: Path) -> None:
    sections = {"eval": EVAL, "algorithm": ALGORITHM}
    builtin = run_train(train_config(lookup_model, tmp_path, name="own", **sections), console=silent())
    changes = {"rollout": {"agent_loop_manager_class": EXAMPLE}, "custom": {"groups": {"at_once": 4}}}
    outside = run_train(train_config(lookup_model, tmp_path, name="outside", **sections, **changes), console=silent())
    for part in ("before", "after"):
        ours, theirs = ({kind: figures[kind]["success"] for kind in ("sampled", "greedy")} for figures in
                        (vars_of(builtin)[part], vars_of(outside)[part]))  # fmt: skip
        assert theirs == ours
    assert rewards(outside.directory) == rewards(builtin.directory)
    assert audit_run(outside.directory, console=silent()).contradictions == []
    # One greedy episode for each group of each step: on disk as what it is, in no row.
    trained = {row.trajectory for row in read_batches(outside.directory / "batches.jsonl").rows}
    written = [
        trajectory
        for trajectory in read_trajectories(outside.directory / "trajectories.twz")
        if trajectory.partition == "train"
    ]
    greedy = [trajectory for trajectory in written if trajectory.baseline]
    assert (len(greedy), len(written)) == (2 * GROUPS, 2 * GROUPS * (MEMBERS + 1))
    assert {trajectory.metrics["temperature"] for trajectory in greedy} == {0.0}
    assert trained
    assert trained.isdisjoint(trajectory.id for trajectory in greedy)
    [first, second] = [record for record in lines(outside.directory / "metrics.jsonl") if record["kind"] == "train"]
    assert first["reward/greedy"] == sum(trajectory.reward for trajectory in greedy[:GROUPS]) / GROUPS
    # The first step samples with the weights of the reference: server and trainer differ by rounding alone.
    assert 0 <= first["kl/value"] < 1e-6 < second["kl/value"]
    assert second["kl/penalty"] > 0


def vars_of(summary) -> dict:
    return {"before": summary.before, "after": summary.after}


def rewards(run: Path) -> list[float]:
    return [record["reward/mean"] for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]


def test_a_manager_that_dies_ends_the_run_with_its_error(lookup_model: Path, tmp_path: Path) -> None:
    changes = {"rollout": {"agent_loop_manager_class": "support.rollout.custom_managers.Dying"}}
    with pytest.raises(TrainError, match="Dying: a task that it started raised RuntimeError: the scheduler lost"):
        run_train(train_config(lookup_model, tmp_path, **changes), console=silent())


@pytest.mark.long
@pytest.mark.alike("lookup")
def test_custom_manager_learns_lookup_to_the_bar_of_the_main_job(warm_lookup: Path, tmp_path: Path) -> None:
    """The bars are those of ``test_main_job.py``, said before it was run."""
    take_warm(warm_lookup, tmp_path / "outside")
    command = [
        sys.executable, str(MAIN), "--runs", str(tmp_path), "--name", "outside",
        f"rollout.agent_loop_manager_class={EXAMPLE}",
        "eval.samples=2",
    ]  # fmt: skip
    done = run_command(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "outside" / "summary.json").read_text())
    assert summary["after"]["sampled"]["success"]["mean"] >= 0.88
    assert summary["after"]["greedy"]["success"]["mean"] >= 0.97
