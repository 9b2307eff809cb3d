"""Every algorithm of ``examples/algorithms`` learns to use the tools of the main job, with a ratio that is clipped.

Runs of 15 steps, not the 25 of the files: what they reach in full stands in docs/algorithms.md.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.lookup_run import environment, lines
from turnwise.config import load_config
from turnwise.trainer.config.train import TrainConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(file.stem for file in (EXAMPLES / "algorithms").glob("*.yaml"))
SHORT = ["steps=15", "eval.limit=100", "eval.samples=2", "eval.greedy=false"]


@pytest.mark.parametrize("name", NAMES)
def test_configuration_is_valid_on_top_of_the_main_job(name: str) -> None:
    files = [EXAMPLES / "lookup" / "train.yaml", EXAMPLES / "algorithms" / f"{name}.yaml"]
    algorithm = load_config(TrainConfig, files).algorithm
    assert name in (algorithm.advantage, algorithm.loss)
    assert algorithm.minibatches >= 4


def play(runs: Path, algorithm: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / "algorithms" / "main.py"), algorithm, "--runs", str(runs), *arguments]
    done = run_command(command, check=False, cwd=runs, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("algorithms")
    yield directory
    shutil.rmtree(directory)


@pytest.mark.long
@pytest.mark.alike("lookup")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_algorithm_learns_to_use_the_tools(name: str, runs: Path, warm_lookup: Path) -> None:
    out = play(runs, name, "--warm", str(warm_lookup), *SHORT)
    summary = json.loads((runs / f"{name}-seed0" / "summary.json").read_text())
    warm_success, trained_success = (summary[part]["sampled"]["success"]["mean"] for part in ("before", "after"))
    clipped = [record.get("train/clip_fraction", 0.0) for record in lines(runs / f"{name}-seed0" / "metrics.jsonl")]
    figures = f"{warm_success:.3f} to {trained_success:.3f}, clipped {max(clipped):.3f} at most"
    print(f"{name}: {figures}, {summary['cpu_s']:.0f} CPU-s")
    assert "clipped:" in out
    assert warm_success <= 0.35
    assert trained_success > 0.85
    assert max(clipped) > 0
