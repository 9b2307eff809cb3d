"""How long `turnwise explain` takes for a run of 10,000 trajectories, and how much memory.

The run has 625 steps of 4 groups of 4 episodes with three turns, two calls of a tool, and the files that a training run
writes: metrics, journal, gaps by turn, trajectories. `seconds` and `mb` are those of the command in a process of its
own, from its start to its end; `--quick` explains 2,000 trajectories.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from harness.measure import ROOT, machine, parse, parser, report, run_process
from turnwise.rollout.journal.state import seal
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter

COUNT, QUICK_COUNT, MEMBERS, GROUPS, TASKS = 10_000, 2_000, 4, 4, 200
TOKENS, PROMPT = 60, 300
BARS = {"seconds": 20.0, "mb": 500.0}
TOOLS = ({"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {}}},)


def episode(number: int, draw: np.random.Generator) -> Trajectory:
    """Return an episode of three turns."""
    step, group = number // (MEMBERS * GROUPS), number // MEMBERS
    segments: list[Segment] = []

    def add(kind: Any, size: int, message: dict[str, Any], **more: Any) -> None:
        ids = draw.integers(0, 50_000, size).astype(np.int32)
        segments.append(Segment(len(segments), len(segments) - 1, kind, ids, (message,), **more))

    add("context", PROMPT, {"role": "user", "content": f"Question {group % TASKS}?"}, tools=TOOLS)
    for turn in range(3):
        logprobs = -draw.exponential(1, TOKENS).astype(np.float32)
        more = {"turn_id": f"t{turn}", "logprobs": logprobs, "finish_reason": "stop"}
        message = {"role": "assistant", "content": f"answer {number % 7}"}
        add("sampled", TOKENS, message, weight_versions=((step, 0, TOKENS),), **more)
        if turn < 2:
            add("context", TOKENS, {"role": "tool", "name": "search", "content": "a result " * 20})
    name = f"0-train-task-{group % TASKS}-e{group // TASKS}"
    metrics = {"tool_calls": 2.0, "tool_calls/search": 2.0, "tool_errors": 0.0, "temperature": 1.0}
    rewards = [("t2", "score", float(draw.random() < 0.5))]
    return Trajectory(
        f"{name}/{number % MEMBERS}.0", f"{name}/{number % MEMBERS}", name, f"task-{group % TASKS}",
        segments=segments, rewards=rewards, metrics=metrics,
    )  # fmt: skip


def metrics(steps: int) -> Iterator[dict[str, Any]]:
    """Yield records of metrics as a run of so many steps has them."""
    yield {"kind": "start", "part": 0, "step": 0}
    for step in range(1, steps + 1):
        names = ("train/entropy", "train/grad_norm", "train/update_ratio", "reward/mean", "gap/mean", "lag/max")
        further = {f"time/part_{number}": 0.5 for number in range(60)}
        yield {"kind": "train", "step": step, **dict.fromkeys(names, 0.001), "train/tokens": 2880.0, **further}


def write_run(run: Path, count: int) -> None:
    """Write the files of a run."""
    draw, steps = np.random.default_rng(0), count // (MEMBERS * GROUPS)
    lines = b"".join(orjson.dumps(record) + b"\n" for record in metrics(steps))
    (run / "metrics.jsonl").write_bytes(lines)
    turns = [{"turn": turn, "tokens": 960, "mean": 1e-6, "max": 1e-5} for turn in range(3)]
    gaps = [{"kind": "gap", "step": step, "turns": turns, "largest": []} for step in range(1, steps + 1)]
    (run / "diagnostics.jsonl").write_bytes(b"".join(orjson.dumps(gap) + b"\n" for gap in gaps))
    events: list[dict[str, Any]] = [{"event": "start", "schema_version": 1, "part": 0, "after_step": 0}]
    writer = TrajectoryWriter(run / TRAJECTORIES)
    for number in range(count):
        trajectory = episode(number, draw)
        writer.write(trajectory)
        key, record = str(number // MEMBERS), [trajectory.id, 0, 0, 0]
        events.append({"event": "member", "key": key, "trajectories": [record]})
        if number % MEMBERS == MEMBERS - 1:
            events.append({"event": "take", "keys": [key], "step": number // (MEMBERS * GROUPS) + 1})
    writer.close()
    (run / "journal.jsonl").write_bytes(b"".join(seal(event) + b"\n" for event in events))


def measure(count: int) -> dict[str, Any]:
    """Return the figures of explaining a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        write_run(run, count)
        started = time.perf_counter()
        command = [sys.executable, "-m", "turnwise", "explain", str(run), "--json"]
        sample = run_process(command, environment={"PYTHONPATH": str(ROOT)})
        seconds = time.perf_counter() - started
    mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    if sample.values["trajectories"] != count:
        raise SystemExit(f"{sample.values['trajectories']} trajectories were read of {count}")
    figures = {"seconds": round(seconds, 3), "mb": round(mb, 1)}
    return {
        **figures, "bars": BARS, "held": {name: figures[name] <= limit for name, limit in BARS.items()},
        "config": {"trajectories": count, "members": MEMBERS, "groups": GROUPS, "tasks": TASKS},
        "machine": machine("turnwise-rl", "numpy", "orjson", "zstandard"),
    }  # fmt: skip


def main() -> None:
    """Measure and report."""
    arguments = parse(parser(__doc__ or "", repeats=1, quick_repeats=1))
    report(measure(QUICK_COUNT if arguments.quick else COUNT))


if __name__ == "__main__":
    main()
