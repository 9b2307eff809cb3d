"""The smallest example of Agent-Lightning 1.0 trains here with one import line changed.

No package index has that version, so the example is written anew in its form: ``train_gsm8k_agent.py`` is its script
with options of verl in OmegaConf, ``gsm8k_agent.py`` its agents.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from support.agents.door_programs.gsm8k_agent import FORM
from support.agents.door_programs.importing import DOORS, PROGRAMS, with_other_imports
from support.agents.isolated_programs import ROOT
from support.trainer.judged_run import COLOURS, MODEL, build_colours
from support.trainer.lookup_run import lines, shared, silent
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory_file import TRAJECTORIES, read_trajectories

pytestmark = [pytest.mark.real, pytest.mark.alike("doors", "agent lightning"), pytest.mark.timeout(600)]

PACKAGE = ROOT / ".cache" / "omegaconf"
QUESTIONS = [f"Name a colour, number {number}." for number in range(4)]


def build_model(directory: Path) -> None:
    """Make a model that answers the agents' prompts by either colour."""
    build_colours(directory, [(f"{question}\n\n{FORM}", colour) for question in QUESTIONS for colour in COLOURS])


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_gsm8k_example_trains_with_one_import_line_changed(
    api: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not PACKAGE.exists():
        pytest.skip("omegaconf is not installed: make test-real installs it into .cache/omegaconf")
    model = shared(tmp_path_factory, "gsm8k-model", build_model) / MODEL
    rows = [{"question": question, "answer": "It is one of two. #### red"} for question in QUESTIONS]
    for name, count in (("train", 4), ("val", 1)):
        datasets.Dataset.from_list(rows[:count]).to_parquet(tmp_path / f"{name}.parquet")
    module = "from {} import run_ppo"
    program = with_other_imports(
        "train_gsm8k_agent.py",
        {module.format("agentlightning.verl.entrypoint"): module.format(f"{DOORS}.lightning")},
        tmp_path,
    )
    command = [
        sys.executable, program, "--train-file", tmp_path / "train.parquet", "--val-file", tmp_path / "val.parquet",
        "--model", model, "--api", api, "data.train_batch_size=2", "trainer.total_epochs=1", "trainer.test_freq=-1",
        "actor_rollout_ref.rollout.name=hf", "data.max_response_length=16", "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.default_local_dir={tmp_path / 'runs'}",
    ]  # fmt: skip
    path = os.pathsep.join(map(str, (PROGRAMS, ROOT, PACKAGE)))
    finished = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    run = tmp_path / "runs" / "gsm8k"
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert [step["batch/trajectories"] for step in steps] == [8, 8]
    trajectories = [
        trajectory for trajectory in read_trajectories(run / TRAJECTORIES) if trajectory.partition == "train"
    ]
    # Each posted one event, which is its reward; the members of some group differ.
    assert len(trajectories) == 16
    assert all([name for _, name, _ in trajectory.rewards] == ["reward"] for trajectory in trajectories)
    assert {trajectory.reward for trajectory in trajectories} == {0.0, 1.0}
    assert audit_run(run, console=silent()).contradictions == []
