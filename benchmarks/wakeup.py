"""How long a finished group waits for a trainer that waits for it: from ``put`` to the return of ``sample``.

Groups of 8 trajectories of 512 tokens are put into a durable buffer (each is journalled first) while other work runs on
the same event loop: 32 tasks that compute for about 0.2 ms and then let others run, as episodes do. ``ms`` is the 99th
percentile. The peer asks every two seconds whether there is enough, as verl's default does; its figure is what such a
poll adds by itself, computed for the same moments.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from harness.measure import machine, parse, parser, report
from turnwise import Trajectory
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.trajectory import Segment, TrajectoryGroup

TASKS, MEMBERS, TOKENS, POLL_S = 32, 8, 512, 2.0
BARS = {"ms": 5.0}


def group(number: int) -> TrajectoryGroup:
    """Return a group to train."""
    ids = np.arange(TOKENS, dtype=np.int32)
    half = TOKENS // 2
    members = []
    for member in range(MEMBERS):
        context = Segment(0, -1, "context", ids[:half], messages=({"role": "user", "content": "go " * 100},))
        logprobs = np.full(half, -0.5, np.float32)
        sampled = Segment(1, 0, "sampled", ids[half:], (), "t1", logprobs, ((0, 0, half),), "stop")
        name = f"0-g{number}/{member}.0"
        members.append(Trajectory(name, name, f"0-g{number}", f"g{number}", segments=[context, sampled]))
    return TrajectoryGroup(f"0-g{number}", f"g{number}", members)


async def load(ended: asyncio.Event, pause: float) -> None:
    """Compute a little and wait a little, until the measurement has ended."""
    while not ended.is_set():
        until = time.perf_counter() + 2e-4
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(pause)


async def waits(directory: Path, count: int) -> tuple[list[float], list[float]]:
    """Return, for each group, the milliseconds until ``sample`` had it, and until a poll would have seen it."""
    journal = Journal.open(directory)
    buffer = LocalReplayBuffer(journal=journal)
    ended = asyncio.Event()
    tasks = [asyncio.create_task(load(ended, 0.02 + 0.001 * number)) for number in range(TASKS)]
    taken, polled, began = [], [], time.perf_counter()
    for number in range(count):
        made = group(number)
        for each in made.trajectories:
            journal.write(each)
        waiting = asyncio.create_task(buffer.sample(number + 1, "train", 1))
        await asyncio.sleep(0.01)
        begun = time.perf_counter()
        await buffer.put(made)
        ref, _ = await waiting
        now = time.perf_counter()
        taken.append((now - begun) * 1e3)
        polled.append((POLL_S - (begun - began) % POLL_S) * 1e3)
        await buffer.release(ref)
    ended.set()
    await asyncio.gather(*tasks)
    journal.close()
    return taken, polled


def measure(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        taken, polled = asyncio.run(waits(Path(place), count))
    figures = {
        "ms": round(float(np.percentile(taken, 99)), 2),
        "ms_median": round(statistics.median(taken), 3),
        "ms_polled": round(float(np.percentile(polled, 99)), 1),
    }
    return {
        **figures,
        "bars": BARS,
        "held": {"ms": figures["ms"] <= BARS["ms"]},
        "config": {"groups": count, "tasks": TASKS, "members": MEMBERS, "tokens": TOKENS, "poll_s": POLL_S},
        "machine": machine("turnwise-rl", "numpy", "orjson"),
    }


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=1, quick_repeats=1))
    report(measure(300 if arguments.quick else 2000))


if __name__ == "__main__":
    sys.exit(main())
