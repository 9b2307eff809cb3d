"""What Ray costs on one machine: a step of the main job with ``placement: ray`` over one with ``placement: local``.

Both sides train the warm-started model of ``examples/lookup`` by its ``train.yaml``, from the same seed, without
evaluations: a server and the trainer, and under Ray one rollout worker besides, in a cluster that the run starts for
itself. The start is left out: ``step_s`` is the median of the seconds of all steps but the first.

``ratio`` is the median over the repeats, in which the sides take turns, of Ray's step over the local one. Bar: at most
1.1. ``phases_s`` has the medians of the seconds that each phase of a step takes (``time/*`` of the run's metrics).
``cpu_s`` are the CPU seconds of the command and of its children that it has waited for, so without Ray's workers.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.lookup_model import LOOKUP, SOURCES, versions
from harness.measure import (
    ROOT,
    Sample,
    cached,
    contents,
    interleave,
    machine,
    median,
    parse,
    parser,
    report,
    run_process,
    spread,
)  # fmt: skip

BAR = 1.1
STEPS, QUICK_STEPS = 12, 3
SIDES: dict[str, list[str]] = {
    "local": ["placement=local"],
    "ray": ["placement=ray", "ray.address=local", "ray.workers.cpus=0.5", "ray.replica.cpus=0.5"],
}


def model() -> Path:
    """Return the model that both sides begin with, made when it is first asked for."""
    files = contents(*SOURCES, LOOKUP / "sft.yaml")
    return cached("ray-overhead", {"files": files, "versions": versions()}, _build) / "sft" / "model"


def _build(directory: Path) -> None:
    sys.path[:0] = [str(LOOKUP), str(LOOKUP.parent / "small_model")]
    from job import Job, warm_start
    from rich.console import Console
    from teacher import demonstrations

    warm_start(Job("lookup", LOOKUP, demonstrations, count=4480), directory, 0, Console(stderr=True))


def side(name: str, steps: int) -> Sample:
    """Train some steps; return the seconds of one."""
    with tempfile.TemporaryDirectory() as runs:
        keys = [f"policies.main.model.path={model()}", f"runs={runs}", f"name={name}", f"steps={steps}", "eval=null"]
        command = [sys.executable, "-m", "turnwise", "train", str(LOOKUP / "train.yaml"), *keys, *SIDES[name]]
        sample = run_process(command)
        records = [json.loads(line) for line in (Path(runs) / name / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"][1:]
    for key in sorted(key for key in trained[0] if key.startswith("time/")):
        sample.values[key.removeprefix("time/")] = statistics.median(record[key] for record in trained)
    return sample


def main() -> int:
    arguments = parse(parser(__doc__ or "", repeats=5, quick_repeats=1))
    steps = QUICK_STEPS if arguments.quick else STEPS
    model()
    samples = interleave({name: functools.partial(side, name, steps) for name in SIDES}, arguments.repeats)
    found: dict[str, Any] = {
        "ratio": round(median(samples["ray"], "step_s") / median(samples["local"], "step_s"), 3),
        "bar": BAR,
        "step_s": {name: round(median(taken, "step_s"), 3) for name, taken in samples.items()},
        "phases_s": {
            key: {name: round(median(taken, key), 4) for name, taken in samples.items()}
            for key in samples["local"][0].values
            if all(key in each.values for taken in samples.values() for each in taken)
        },
        "config": {"steps": steps, "file": str((LOOKUP / "train.yaml").relative_to(ROOT)), "sides": SIDES},
        "machine": machine("turnwise-rl", "torch", "ray"),
        "samples": spread(samples),
    }
    report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
