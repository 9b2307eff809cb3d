"""What the asynchronous modes gain where tools take long now and then: trajectories a second over those of ``sync``.

All three modes train the same small model, warm-started and not measured, in ``lookup`` (``harness/async_side.py``):
8 groups of 4 episodes a step, up to 4 turns each, after each of which the tools answer in a time drawn by a fixed seed
from a Pareto distribution (shape 1.2, at least 30 ms, cut off at 1.5 s). The server has one core and the trainer
another. Both asynchronous modes have the same staleness bound of 2 weight versions; the run says how stale it was.

``ratio_separate`` and ``ratio_colocate`` are medians over the repeats, in which the modes take turns. Bars: 1.5, 1.2.
No peer is measured: our own synchronous loop is the other side.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from harness.async_side import GROUPS, LEAST_S, MEMBERS, MODES, MOST_S, STALENESS, TAIL, TURNS
from harness.lookup_model import SOURCES, versions, write_model
from harness.measure import (
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

BARS = {"ratio_separate": 1.5, "ratio_colocate": 1.2}
STEPS, QUICK_STEPS = 16, 3
WIDTH, LAYERS = 96, 3
SFT: dict[str, Any] = {
    "steps": 80,
    "conversations": 16,
    "optim": {"name": "muon", "lr": 4e-3},
    "schedule": {"kind": "wsd", "warmup_steps": 5},
}
HERE = Path(__file__).parent


def model() -> Path:
    """Return the model that all modes begin with, made when it is first asked for."""
    sources = contents(*SOURCES)
    inputs = {"width": WIDTH, "layers": LAYERS, "sft": SFT, "files": sources, "versions": versions()}
    return cached("async-modes", inputs, _build) / "sft" / "model"


def _build(directory: Path) -> None:
    from turnwise.trainer.config.offline import SFTConfig
    from turnwise.trainer.offline.sft import run_sft

    rows = write_model(directory / "base", 400, width=WIDTH, layers=LAYERS)
    data = directory / "demonstrations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "sft",
        "runs": directory,
        "data": data,
        "model": {"path": directory / "base", "threads": 1},
        **SFT,
    }
    run_sft(SFTConfig.model_validate(config))


def side(name: str, steps: int) -> Sample:
    command = [sys.executable, str(HERE / "harness" / "async_side.py"), str(model()), name, str(steps)]
    return run_process(command)


def main() -> int:
    arguments = parse(parser(__doc__ or "", repeats=5, quick_repeats=1))
    steps = QUICK_STEPS if arguments.quick else STEPS
    model()
    samples = interleave({name: functools.partial(side, name, steps) for name in MODES}, arguments.repeats)
    speed = {name: median(taken, "trajectories_per_s") for name, taken in samples.items()}
    found: dict[str, Any] = {
        "ratio_separate": round(speed["separate"] / speed["sync"], 3),
        "ratio_colocate": round(speed["colocate"] / speed["sync"], 3),
        "bars": BARS,
        "trajectories_per_s": {name: round(value, 2) for name, value in speed.items()},
        "lag_max": {name: max(each.values["lag_max"] for each in taken) for name, taken in samples.items()},
        "update_s": {name: round(median(taken, "update_s"), 3) for name, taken in samples.items()},
        "step_s": {name: round(median(taken, "step_s"), 3) for name, taken in samples.items()},
        "config": {
            "steps": steps, "groups": GROUPS, "members": MEMBERS, "turns": TURNS, "staleness_bound": STALENESS,
            "latency_s": {"pareto_shape": TAIL, "least": LEAST_S, "most": MOST_S},
            "width": WIDTH, "layers": LAYERS, "repeats": arguments.repeats,
        },
        "machine": machine("turnwise-rl", "torch"),
        "samples": spread(samples),
    }  # fmt: skip
    report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
