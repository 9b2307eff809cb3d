"""What recording and learning add to the latency of a served turn, while updates run.

32 users talk to the same model at the same time, each in one session of four turns after the other, with at most 16
sampled tokens a turn, and one turn in three seconds: a load at which the server is not saturated. Two processes of
``turnwise live`` with one configuration serve the same schedule in turn: to one the users give no consent, so that it
serves and does nothing else; to the other they do, and rate all sessions, and it learns a step from every 16 of them,
writes its records and checkpoints, and sends weights that change between two turns. The learning rate is so small that
the sides' answers stay alike.

A turn's latency is from when it was due to the last byte of its answer, so that a wait for the turn before it counts.
``added_ms_p50`` and ``added_ms_p99``: that quantile over all turns of the learning side less the same quantile of the
other side in the same repeat; medians over the repeats. ``updating``: the same of those turns alone that were in flight
while a step was learned (its update, the transfer of its weights, its checkpoint), less that quantile of all turns of
the other side. ``updating_share``: the part of the time in which a step was learned.

The script fails unless both sides served all turns without an error and sampled as many tokens to within a twentieth,
and steps were learned in every repeat.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from harness.live_side import PERIOD_S, SESSION_TURNS, LiveSide, Turn, talk
from harness.lookup_model import SOURCES, versions, write_model
from harness.measure import cached, contents, machine, parse, parser, report
from turnwise.config import load_config
from turnwise.ext.live.command import DEFAULTS
from turnwise.trainer.config.train import TrainConfig

USERS, BATCH = 32, 16
TURNS, QUICK_TURNS = 16, 5
BARS = {"added_ms_p50": 2.0, "added_ms_p99": 60.0}


def side_config(model: Path, runs: Path) -> TrainConfig:
    """Return the configuration of both sides."""
    settings: dict[str, Any] = {
        **DEFAULTS,
        "name": "live",
        "runs": str(runs),
        "policies": {"main": {"model": {"path": str(model), "threads": 1}, "optim": {"lr": 1e-7}}},
        "rollout": {**DEFAULTS["rollout"], "max_tokens_per_turn": 16},
        "inference": {"threads": 1},
        "batch": {"groups": BATCH},
        "custom": {"live": {"port": 0}},
    }
    return load_config(TrainConfig, defaults=settings)


def quantiles(turns: list[Turn]) -> dict[str, float]:
    """Return the median and the 99th percentile of latencies, in milliseconds."""
    cuts = statistics.quantiles([turn.seconds * 1e3 for turn in turns], n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


def during(turns: list[Turn], spans: list[tuple[float, float]]) -> list[Turn]:
    """Return the turns that were in flight in one of the spans."""
    return [turn for turn in turns if any(turn.due < end and turn.due + turn.seconds > begin for begin, end in spans)]


async def serve(side: LiveSide, turns: int, *, consent: bool) -> dict[str, Any]:
    """Let the users talk to one side, and return what they saw and what it cost."""
    steps, cpu, began = await side.settle(BATCH), side.cpu_s(), time.time()
    served = await talk(side, USERS, turns, consent=consent)
    end_time = time.time()
    steps = await side.settle(BATCH) - steps
    spans = [(begin, min(end, end_time)) for begin, end in side.updates() if began <= begin < end_time]
    values: dict[str, Any] = {
        "wall_s": end_time - began,
        "cpu_s": side.cpu_s() - cpu,
        "turns": len(served),
        "tokens": sum(turn.tokens for turn in served),
        "steps": steps,
        "updating_share": sum(end - begin for begin, end in spans) / (end_time - began),
        "all": quantiles(served),
    }
    if not consent:
        return values
    affected = during(served, spans)
    if steps < 1 or len(affected) < 2:
        raise SystemExit(f"{steps} steps were learned while users were served, and {len(affected)} turns met them")
    return values | {"updating": quantiles(affected), "updating_turns": len(affected)}


async def measure(model: Path, turns: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Serve the schedule by both sides in turn; return the samples of each."""
    samples: dict[str, list[dict[str, Any]]] = {"serving": [], "learning": []}
    with tempfile.TemporaryDirectory(prefix="turnwise-bench-") as scratch:
        sides = {}
        try:
            for name in samples:
                sides[name] = await LiveSide.start(side_config(model, Path(scratch) / name))
            # The first turns and the first step compile, allocate and import.
            warm = [talk(side, USERS, 2, consent=name == "learning") for name, side in sides.items()]
            await asyncio.gather(*warm)
            for repeat in range(repeats):
                for name in sorted(sides, reverse=repeat % 2 == 0):
                    sample = await serve(sides[name], turns, consent=name == "learning")
                    samples[name].append(sample)
                    print(f"{name} {repeat + 1}/{repeats}: {shortened(sample)}", file=sys.stderr, flush=True)
        finally:
            for side in sides.values():
                side.stop()
    return samples


def shortened(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with rounded figures."""
    return {
        key: shortened(value) if isinstance(value, dict) else round(value, 3) if isinstance(value, float) else value
        for key, value in sample.items()
    }


def compare(samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what learning adds; refuse sides that did not do the same work."""
    pairs = list(zip(samples["serving"], samples["learning"], strict=True))
    for serving, learning in pairs:
        if serving["turns"] != learning["turns"] or abs(serving["tokens"] / learning["tokens"] - 1) > 0.05:
            raise SystemExit(f"the sides did not do the same work: {serving} and {learning}")

    def added(kind: str, cut: str) -> float:
        differences = [learning[kind][cut] - serving["all"][cut] for serving, learning in pairs]
        return round(statistics.median(differences), 2)

    figures = {f"added_ms_{cut}": added("all", cut) for cut in ("p50", "p99")}
    return {
        **figures,
        "bars": BARS,
        "held": {name: figures[name] <= limit for name, limit in BARS.items()},
        "updating": {f"added_ms_{cut}": added("updating", cut) for cut in ("p50", "p99")},
        "updating_share": round(statistics.median(learning["updating_share"] for _, learning in pairs), 3),
    }


def show(samples: dict[str, list[dict[str, Any]]]) -> None:
    """Print the results for a person."""
    table = Table("side", "turns", "p50 ms", "p99 ms", "updating p50", "p99", "CPU-s", "wall s", "steps")
    for name, repeats in samples.items():
        for sample in repeats:
            cuts = [*sample["all"].values(), *sample.get("updating", {"p50": 0.0, "p99": 0.0}).values()]
            figures = (sample["turns"], *cuts, sample["cpu_s"], sample["wall_s"], sample["steps"])
            table.add_row(name, *(f"{figure:.4g}" for figure in figures))
    Console(stderr=True, width=100).print(table)


def main() -> None:
    """Measure and report."""
    arguments = parse(parser(__doc__ or "", repeats=5, quick_repeats=1))
    inputs = {"size": "lookup", **versions(), **contents(*SOURCES)}
    model = cached("live-lookup", inputs, lambda directory: write_model(directory / "model", 400) and None) / "model"
    turns = QUICK_TURNS if arguments.quick else TURNS
    samples = uvloop.run(measure(model, turns, arguments.repeats))
    show(samples)
    shared = side_config(model, Path("runs")).model_dump(mode="json", exclude_defaults=True)
    report(
        {
            **compare(samples),
            "config": {
                "serving": {**shared, "consent": False},
                "learning": {**shared, "consent": True},
                "traffic": {"users": USERS, "turns": turns, "session_turns": SESSION_TURNS, "period_s": PERIOD_S},
            },
            "machine": machine("turnwise-rl", "torch", "transformers", "uvloop", "uvicorn", "aiohttp"),
            "samples": {name: [shortened(sample) for sample in repeats] for name, repeats in samples.items()},
        }
    )


if __name__ == "__main__":
    main()
