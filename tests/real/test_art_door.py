"""ART's own types say what those here say, and a program for ART trains here with its import lines changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.agents.door_programs.importing import PROGRAMS, with_other_imports
from support.agents.isolated_programs import ROOT, program
from support.trainer.judged_run import MODEL, build_judge
from support.trainer.lookup_run import lines, shared, silent
from turnwise.trainer.run.audit import audit_run

pytestmark = [pytest.mark.real, pytest.mark.alike("doors", "art"), pytest.mark.timeout(600)]

NAME = "train_colours_art.py"
IMPORTS = {
    "import art": "import art_door as art",
    "from art.local import LocalBackend": "from art_door import LocalBackend",
}


def run_program(python: str, file: Path, *arguments: object) -> list[dict[str, object]]:
    """Run a program and return the JSON lines that it printed."""
    finished = subprocess.run(
        [python, str(file), *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples' / 'art' / 'src'}",
            "OMP_NUM_THREADS": "1",
        },
        cwd=file.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]


def test_trajectories_and_groups_equal_those_of_art(tmp_path: Path) -> None:
    theirs = run_program(program("python", ".venv-art/bin"), PROGRAMS / NAME)
    assert run_program(sys.executable, with_other_imports(NAME, IMPORTS, tmp_path)) == theirs


def test_program_for_art_trains_with_import_lines_changed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = shared(tmp_path_factory, "judge-model", build_judge) / MODEL
    file = with_other_imports(NAME, IMPORTS, tmp_path)
    steps = run_program(sys.executable, file, model, tmp_path / "runs")
    assert [step["step"] for step in steps] == [1, 2]
    assert [(step["groups"], step["exceptions"]) for step in steps] == [([3, 3, 3], [1])] * 2
    run = tmp_path / "runs" / "doors" / "colours"
    records = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    # What the program left out is not trained, and its rates and rewards are those of the steps.
    assert [(record["batch/trajectories"], record["lr/adamw"]) for record in records] == [(9, 1e-3), (9, 2e-3)]
    for step, record in zip(steps, records, strict=True):
        rewards = step["rewards"]
        assert isinstance(rewards, list)
        assert record["reward/mean"] == pytest.approx(sum(rewards) / 9)
    report = audit_run(run, console=silent())
    assert report.contradictions == []
    assert report.counts["turns equal to a call"] == report.counts["turns"] >= 2 * 16
    # Started again, it has nothing left to do.
    assert run_program(sys.executable, file, model, tmp_path / "runs") == []
