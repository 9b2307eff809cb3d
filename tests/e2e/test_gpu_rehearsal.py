"""What a GPU is tested and measured with runs on a CPU too, so that only the device is untried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.alike("gpu rehearsals")
def test_the_gpu_tests_rehearse_on_a_cpu() -> None:
    done = run("-m", "pytest", "tests/gpu", "-n", "0", "-p", "no:cacheprovider", "-rs", TURNWISE_GPU_REHEARSE="1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(done.stdout.split(" passed")[0].rsplit(maxsplit=1)[-1]) >= 14
    skips = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("nothing to rehearse" in reason for reason in skips), skips


@pytest.mark.alike("gpu rehearsals")
def test_the_gpu_benchmark_rehearses_on_a_cpu() -> None:
    done = run("benchmarks/gpu.py", "--rehearse")
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["limits"]["tflop_per_s"] > 0
    assert all(report["engine"][f"tokens_per_s_{count}"] > 0 for count in report["config"]["batches"])
    assert report["step"]["utilisation"] > 0
    assert report["lookup"]["time/step_s"] >= report["lookup"]["time/rollout_s"] > 0
    assert "skipped" in report["smollm2"]


@pytest.mark.alike("gpu rehearsals")
def test_the_gpu_session_rehearses_within_its_minutes_and_resumes(tmp_path: Path) -> None:
    """A first call has time for a part; the next one does the others, and none twice."""
    session = "benchmarks/gpu_session.py", "--rehearse", "--results", str(tmp_path / "results.json")
    done: list[str] = []
    for minutes in (
        "0.9",
        "1.8",
        "3.6",
        "7.2",
    ):  # a slow machine compiles for a minute or two before its first part ends
        first = run(*session, "--minutes", minutes)
        assert first.returncode == 0, first.stderr[-4000:]
        if done := [name for name, state in json.loads(first.stdout.splitlines()[-1]).items() if state == "done"]:
            break
    assert done, (first.stdout[-2000:], first.stderr[-4000:])
    second = run(*session)
    assert second.returncode == 0, second.stderr[-4000:]
    states = json.loads(second.stdout.splitlines()[-1])
    results = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert all(states[part] == "done" for part in results), {name: part["error"] for name, part in results.items()}
    assert not any(line.startswith(f"{done[0]}:") for line in second.stderr.splitlines())
    steps = {line["name"]: line for line in results["steps"]["lines"]}
    assert steps["all"]["used"] == ["bfloat16_weights", "compile", "fused_loss"]
    assert all("error" not in line for line in steps.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_benchmark_without_a_gpu_names_the_missing_device() -> None:
    done = run("benchmarks/gpu.py", "--only", "limits")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "finds no CUDA device" in json.loads(done.stdout.splitlines()[-1])["skipped"]
