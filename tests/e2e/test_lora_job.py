"""The main job with adapters: equal success, and servers that are sent the adapters alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from support.processes.warm import run_command
from support.trainer.lookup_run import take_warm

MAIN = Path(__file__).parents[2] / "examples" / "lookup" / "main.py"


@pytest.mark.long
@pytest.mark.alike("lookup")
def test_adapters_learn_to_use_the_tools_and_are_all_that_is_sent(warm_lookup: Path, tmp_path: Path) -> None:
    take_warm(warm_lookup, tmp_path / "lora")
    command = [sys.executable, str(MAIN), "--also", "lora.yaml", "--runs", str(tmp_path), "--name", "lora", "steps=16"]
    done = run_command(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "lora"
    summary = json.loads((run / "summary.json").read_text())
    figures = {part: summary[part]["sampled"]["success"]["mean"] for part in ("before", "after")}
    print(f"{figures}, {summary['cpu_s']:.0f} CPU-s")
    assert figures["before"] <= 0.35
    assert figures["after"] > 0.85
    assert summary["after"]["greedy"]["success"]["mean"] > 0.85
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"kind":"train"' in line]
    # A step whose groups all have equal rewards changes nothing, and sends nothing.
    trained = [step for step in steps if "gap/max" in step]
    assert len(trained) > len(steps) / 2
    assert max(step["gap/max"] for step in trained) < 1e-4
    with safe_open(run / "sft" / "model" / "model.safetensors", framework="np") as file:
        size = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - it is no dictionary
    assert {step["sync/bytes"] for step in trained} == {1245184.0}
    assert steps[0]["sync/bytes"] < size / 2
    audit = [sys.executable, "-m", "turnwise", "audit", str(run)]
    checked = run_command(audit, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
