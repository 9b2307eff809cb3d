"""A rollout manager that was written outside the package trains ``lookup``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.lookup_run import environment, lines, silent, train_config
from turnwise.errors import TrainError
from turnwise.trainer.audit import audit_run
from turnwise.trainer.train import run_train

MAIN = Path(__file__).parents[2] / "examples" / "lookup" / "main.py"
PLAIN = "support.outside_manager.PlainManager"
EVAL = {"tasks": "turnwise.envs.lookup:tasks?n=3&split=test", "samples": 2, "greedy": True, "every": None}


def test_it_trains_as_the_package_s_own_does(lookup_model: Path, tmp_path: Path) -> None:
    own = run_train(train_config(lookup_model, tmp_path, name="own", eval=EVAL), console=silent())
    changes = {"rollout": {"agent_loop_manager_class": PLAIN}, "custom": {"at_once": 4}}
    outside = run_train(train_config(lookup_model, tmp_path, name="outside", eval=EVAL, **changes), console=silent())
    for part in ("before", "after"):
        ours, theirs = ({kind: figures[kind]["success"] for kind in ("sampled", "greedy")} for figures in
                        (vars_of(own)[part], vars_of(outside)[part]))  # fmt: skip
        assert theirs == ours
    assert rewards(outside.directory) == rewards(own.directory)
    assert audit_run(outside.directory, console=silent()).contradictions == []


def vars_of(summary) -> dict:
    return {"before": summary.before, "after": summary.after}


def rewards(run: Path) -> list[float]:
    return [record["reward/mean"] for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]


def test_a_manager_that_dies_ends_the_run_with_its_error(lookup_model: Path, tmp_path: Path) -> None:
    changes = {"rollout": {"agent_loop_manager_class": "support.outside_manager.Dying"}}
    with pytest.raises(TrainError, match="Dying: a task that it started raised RuntimeError: the scheduler lost"):
        run_train(train_config(lookup_model, tmp_path, **changes), console=silent())


@pytest.mark.long
def test_it_learns_lookup_to_the_bar_of_the_main_job(tmp_path: Path) -> None:
    """The bars are those of ``test_main_job.py``, said before it was run."""
    command = [
        sys.executable, str(MAIN), "--runs", str(tmp_path), "--name", "outside",
        f"rollout.agent_loop_manager_class={PLAIN}",
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "outside" / "summary.json").read_text())
    assert summary["after"]["sampled"]["success"]["mean"] >= 0.88
    assert summary["after"]["greedy"]["success"]["mean"] >= 0.97
