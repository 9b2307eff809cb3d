"""``make train-real``: a pretrained model learns chains of operations that it was never shown, within its time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes.warm import run_command

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".cache" / "smollm2"
# On two idle cores it takes a third of that; here other tests run beside it.
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


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


def success(part: dict[str, Any], kind: str) -> float:
    return part[kind]["success"]["mean"]


def test_it_learns_chains_that_it_was_not_shown(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["before"]["sampled"]["success"]["episodes"] == 64
    assert success(summary["before"], "sampled") <= 0.5
    assert success(summary["after"], "sampled") >= 0.95
    assert success(summary["after"], "greedy") >= 0.95


def test_the_audit_recomputes_what_it_left(run: Path) -> None:
    command = [sys.executable, "-m", "turnwise", "audit", str(run), "--at-most", "16"]
    result = run_command(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no contradictions" in result.stdout


def test_the_trained_model_shows_tools_by_its_own_template(run: Path) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    assert "tool_call" in (checkpoint / "chat_template.jinja").read_text()
