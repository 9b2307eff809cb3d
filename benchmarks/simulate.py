"""The three modes at 8 to 4,096 GPUs, simulated: what asynchronous training gains, what staleness and failures cost.

``harness/simulation.py`` has the simulation and says what is simulated and what is not. Times of decoding, prefill and
training are the rooflines of ``harness/roofline.py`` with its default assumptions (35 % of the arithmetic, 60 % of the
memory bandwidth, 3 ms a decoding step besides).

- ``published``: three runs that verl publishes (docs/advance/v1_async_trainer.md): Qwen3.5-35B-A3B on 4 nodes of 8
  GPUs, 64 x 8 responses of up to 32,768 tokens, 150 steps, in 22.79 h (``sync``), 14.72 h (``colocate_async``) and
  14.10 h (``separate_async``). One constant is not from data sheets: how much slower that software is than the
  formulas. It is taken from another run of the same page (3 nodes, 473.4 s a step), never from the three that are
  predicted. Bar: each within 15 %. ``span`` has the errors under other assumptions about the lengths, of which only the
  mean is published. ``separate_over_sync`` is the ratio of two of the hours, whose error is larger than theirs.
- ``own``: ``async_modes`` of this folder, as docs/benchmarks.md quotes it: ``separate_async`` and ``colocate_async``
  finish 2.63 and 2.62 times the trajectories a second of ``sync``.
- ``scale``: Qwen3-8B, episodes of four turns with long-tailed completions and tools, 8 a GPU and step.
- ``staleness``: the same on 64 GPUs by ``replay.max_staleness``, in ``separate_async``.
- ``failures``: seconds that one failure costs, and what follows for 4,096 GPUs at the rate that Llama 3 405B's training
  reports (arXiv:2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs).
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from typing import Any

from harness.measure import machine, parse, parser, report
from harness.model_shape import Experts, ModelShape
from harness.roofline import Accelerators
from harness.simulation import MODES, Lengths, Mode, Setting, mean_step

BAR = 0.15
PUBLISHED_H: dict[Mode, float] = {"sync": 22.79, "colocate_async": 14.72, "separate_async": 14.10}
# Mean response of each of the runs, and of the one that the speed is taken from.
RESPONSES: dict[Mode, float] = {"sync": 12_720, "colocate_async": 12_854, "separate_async": 12_288}
OTHER_RESPONSE, OTHER_STEP_S = 13_343, 13.15 * 3600 / 100
# Seconds of a step besides its phases: on shared devices the median of five published steps less their published phases
# (docs/advance/fully_async.md: 55.2, 10.9, 10.7, 14.0, 0.4); on separate ones the published sync of a 30B-A3B model.
BETWEEN_S: dict[Mode, float] = {"sync": 10.9, "colocate_async": 10.9, "separate_async": 4.4}
OWN = {"colocate_async": 2.62, "separate_async": 2.63}
HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
# 40 layers, of which 30 have a recurrent state in the place of keys and values: 32 heads of 128 x 128 numbers in
# float32 are as large as the keys and values of 1,024 tokens in one of the others.
QWEN35_35B = ModelShape(
    40, 2048, 16, 2, 256, 512, 248_320,
    experts=Experts(256, 8, 512, 512, 40), windowed=30, window=1024, dtype="bfloat16",
)  # fmt: skip
QWEN3_8B = ModelShape(36, 4096, 32, 8, 128, 12_288, 151_936, dtype="bfloat16")
SMALL = ModelShape(3, 96, 4, 2, 32, 288, 700)
PER_GPU = 8
AGENTS = Lengths(600, 4, 400, 8192, sigma=1.0, observation=200, tool_s=0.5, tool_shape=1.2, tool_most_s=60)


def predicted(steps: int, **lengths: float) -> dict[str, Any]:
    """Return the hours of the published runs, and how much slower than the formulas their software is."""
    cluster = Accelerators()

    def setting(mode: Mode, response: float, rollout: int, train: int, passes: float) -> Setting:
        drawn = Lengths(150, 1, response, 32_768, **lengths)
        return Setting(
            QWEN35_35B, cluster, 4, rollout, train, 64, 8, drawn, passes, staleness=8, max_seqs=1024,
            sync_s=BETWEEN_S[mode],
        )  # fmt: skip

    # Old log-probabilities are recomputed in the three runs, and not in the other.
    other = mean_step(setting("separate_async", OTHER_RESPONSE, 8, 16, 4.0), "separate_async", steps).step_s
    fixed = BETWEEN_S["separate_async"]
    slower = (OTHER_STEP_S - fixed) / (other - fixed)
    hours = {}
    for mode in MODES:
        rollout, train = (16, 16) if mode == "separate_async" else (32, 32)
        one = replace(setting(mode, RESPONSES[mode], rollout, train, 5.0), slower=slower)
        hours[mode] = 150 * mean_step(one, mode, steps).step_s / 3600
    errors = {mode: hours[mode] / PUBLISHED_H[mode] - 1 for mode in MODES}
    return {"slower": slower, "hours": hours, "errors": errors}


def published(steps: int) -> dict[str, Any]:
    """Return the prediction, and its errors under other assumptions about lengths."""
    found = predicted(steps)
    others: list[dict[str, float]] = [{"sigma": 0.6}, {"sigma": 1.0}, {"shared": 0.2}, {"shared": 0.8}]
    span = [predicted(steps, **each)["errors"] for each in others]
    ranges = {mode: [min(each[mode] for each in span), max(each[mode] for each in span)] for mode in MODES}
    ratios = {
        name: hours["separate_async"] / hours["sync"]
        for name, hours in (("predicted", found["hours"]), ("published", PUBLISHED_H))
    }
    return {
        **found,
        "published": PUBLISHED_H,
        "separate_over_sync": ratios,
        "largest_error": max(map(abs, found["errors"].values())),
        "span": ranges,
    }


def own(steps: int) -> dict[str, Any]:
    """Return the gains in the setting of ``async_modes``: a small model on CPUs, tools with a long tail."""
    cluster = Accelerators(tflops=0.1, bandwidth_gb_s=10, step_overhead_ms=4)
    lengths = Lengths(60, 4, 13, 40, sigma=0.4, observation=10, tool_s=0.03, tool_shape=1.2, tool_most_s=1.5)
    base = Setting(
        SMALL, cluster, 1, 1, 1, 8, 4, lengths, 3.0, stream=1, ahead=2, staleness=2, sync_s=0.05, pauses=False
    )
    found = {mode: mean_step(base, mode, steps).step_s for mode in MODES}
    return {"step_s": found, "ratio": {mode: found["sync"] / found[mode] for mode in OWN}, "measured": OWN}


def agents(gpus: int, mode: Mode, per_gpu: int) -> Setting:
    """Return the setting of ``scale``: servers of one GPU; apart, three of eight GPUs train."""
    train = gpus if mode != "separate_async" else gpus * 3 // 8
    rollout = gpus if mode != "separate_async" else gpus - train
    return Setting(
        QWEN3_8B, Accelerators(), 1, rollout, train, gpus * per_gpu // 8, 8, AGENTS,
        ahead=2, staleness=2, hours_between_failures=HOURS_BETWEEN_FAILURES,
    )  # fmt: skip


def scale(steps: dict[int, int], per_gpu: int) -> list[dict[str, Any]]:
    """Return seconds a step of each mode by the number of GPUs."""
    found = []
    for gpus, count in steps.items():
        results = {mode: mean_step(agents(gpus, mode, per_gpu), mode, count) for mode in MODES}
        base = results["sync"].step_s
        found.append(
            {
                "gpus": gpus,
                "episodes": gpus * per_gpu,
                "modes": {mode: asdict(result) for mode, result in results.items()},
                "gain": {mode: base / results[mode].step_s for mode in MODES},
            }
        )
        print(f"{gpus} GPUs: {found[-1]['gain']}", file=sys.stderr, flush=True)
    return found


def staleness(steps: int) -> list[dict[str, Any]]:
    """Return the gain of ``separate_async`` over ``sync`` by the bound of staleness."""
    base = mean_step(agents(64, "sync", PER_GPU), "sync", steps).step_s
    found = []
    for bound in (0, 1, 2, 4):
        setting = replace(agents(64, "separate_async", PER_GPU), ahead=bound, staleness=bound)
        # What is requested at the beginning has to be gone.
        result = mean_step(setting, "separate_async", max(steps, 4 * (1 + bound)))
        found.append({"max_staleness": bound, "gain": base / result.step_s, "reached": result.staleness})
    return found


def failures(steps: int) -> dict[str, Any]:
    """Return the seconds that a failure costs, at one failure in twenty minutes on 64 GPUs, and the share at 4,096."""
    found = {}
    for mode in MODES:
        calm = replace(agents(64, mode, PER_GPU), hours_between_failures=None)
        rough = replace(calm, hours_between_failures=64 / 3)
        without, with_ = (mean_step(each, mode, steps) for each in (calm, rough))
        cost = (with_.step_s - without.step_s) * steps / max(1, with_.failures)
        hours = HOURS_BETWEEN_FAILURES / 4096
        found[mode] = {
            "failures": with_.failures,
            "cost_s": cost,
            "trained_again": with_.trained_again,
            "share_at_4096": cost / (3600 * hours),
        }
    return found


def rounded(value: Any) -> Any:
    """Round all numbers of a result."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> int:
    arguments = parse(parser(__doc__ or "", repeats=1, quick_repeats=1))
    quick = arguments.quick
    started = time.perf_counter()
    found: dict[str, Any] = {"published": published(10 if quick else 40), "own": own(30 if quick else 200)}
    if quick:
        # The larger ones have a share of their episodes.
        found["scale"] = scale({8: 20, 64: 8}, PER_GPU) + scale({512: 4}, 4) + scale({4096: 4}, 1)
    else:
        found["scale"] = scale({8: 100, 64: 40, 512: 12, 4096: 5}, PER_GPU)
    found["staleness"] = staleness(4 if quick else 30)
    found["failures"] = failures(20 if quick else 120)
    events = sum(result["events"] for each in found["scale"] for result in each["modes"].values())
    result = {
        "largest_error": found["published"]["largest_error"],
        "gain_separate": {each["gpus"]: each["gain"]["separate_async"] for each in found["scale"]},
        "bars": {"largest_error": BAR},
        **found,
        "events_of_scale": events,
        "wall_s": time.perf_counter() - started,
        "machine": machine("turnwise-rl"),
    }
    report(rounded(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
