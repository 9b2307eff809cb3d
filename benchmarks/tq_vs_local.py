"""Where finished groups wait: in the trainer's memory, or in the storage processes of a TransferQueue.

10,000 trajectories of 4,096 tokens, half of them sampled, in groups of 8. Each group is put into the buffer, 8 side by
side as rollouts end, and journalled; whenever 64 wait, batches of 16 are sampled, fetched with the fields that a train
step reads, and released. Both sides have a journal. ``groups_per_s`` is groups over the wall seconds of all that, start
excluded; ``ratio`` is TransferQueue's over the local buffer's. ``mb_copied`` are the bytes that the trajectories took
out of and into the trainer's process (10**6 a MB): written to the journal, sent to the queue, read from it.
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
from replay import BATCH, MEMBERS, TOKENS, TRAJECTORIES, WAITING, trajectory
from rich.console import Console
from rich.table import Table

from harness.measure import machine, parse, parser, report
from turnwise.ext.frameworks.transfer_queue import TransferQueuePayloads
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.group_store import TransferQueueConfig
from turnwise.trajectory import TrajectoryGroup

FIELDS = ("tokens", "rewards", "metrics")
SIDE_BY_SIDE = 8
QUICK = 512


async def walk(directory: Path, count: int, payloads: TransferQueuePayloads | None) -> dict[str, float]:
    """Put, sample, fetch and release; what makes the trajectories is not counted."""
    journal = Journal.open(directory)
    buffer = LocalReplayBuffer(journal=journal, payloads=payloads)
    copied = 0 if payloads is None else payloads.sent_bytes + payloads.received_bytes
    draw, put_s, fetch_s, cpu_s, step, tokens = np.random.default_rng(0), 0.0, 0.0, 0.0, 0, 0
    groups = count // MEMBERS
    for first in range(0, groups, WAITING):
        names = [f"g{number}" for number in range(first, min(first + WAITING, groups))]
        made = [
            TrajectoryGroup(f"0-{name}", name, [trajectory(name, each, draw) for each in range(MEMBERS)])
            for name in names
        ]
        cpu, begun = time.process_time(), time.perf_counter()
        for start in range(0, len(made), SIDE_BY_SIDE):
            await asyncio.gather(*map(buffer.put, made[start : start + SIDE_BY_SIDE]))
        put_s += time.perf_counter() - begun
        begun = time.perf_counter()
        while waiting := len(buffer.ready("train")):
            step += 1
            ref, _ = await buffer.sample(step, "train", min(BATCH, waiting))
            found = await buffer.fetch(ref, FIELDS)
            await buffer.release(ref)
            tokens += sum(len(each.token_ids) for group in found for one in group.trajectories for each in one.segments)
        fetch_s += time.perf_counter() - begun
        cpu_s += time.process_time() - cpu
    journal.close()
    if tokens != groups * MEMBERS * TOKENS:
        raise SystemExit(f"{tokens} tokens came back of {groups * MEMBERS * TOKENS}")
    written = (directory / "trajectories.twz").stat().st_size
    moved = 0 if payloads is None else payloads.sent_bytes + payloads.received_bytes - copied
    return {
        "groups_per_s": groups / (put_s + fetch_s),
        "put_ms": 1000 * put_s / groups,
        "fetch_ms": 1000 * fetch_s / groups,
        "cpu_s": cpu_s,
        "mb_copied": (written + moved) / 1e6,
    }


async def sides(count: int, repeats: int) -> dict[str, dict[str, float]]:
    """Run both sides in turn; return the median of each figure."""
    queue = TransferQueuePayloads(TransferQueueConfig())
    await queue.start()
    samples: dict[str, list[dict[str, float]]] = {"local": [], "transfer_queue": []}
    try:
        # The first call of each process imports and connects.
        with tempfile.TemporaryDirectory() as place:
            await walk(Path(place), SIDE_BY_SIDE * MEMBERS, queue)
        for repeat in range(repeats):
            for side in list(samples) if repeat % 2 == 0 else list(reversed(samples)):
                with tempfile.TemporaryDirectory() as place:
                    samples[side].append(await walk(Path(place), count, queue if side == "transfer_queue" else None))
    finally:
        await queue.close()
    return {
        side: {key: round(statistics.median(each[key] for each in found), 2) for key in found[0]}
        for side, found in samples.items()
    }


def measure(count: int, repeats: int) -> dict[str, Any]:
    figures = asyncio.run(sides(count, repeats))
    table = Table(title=f"{count} trajectories of {TOKENS} tokens in groups of {MEMBERS}")
    table.add_column("figure")
    for side in figures:
        table.add_column(side, justify="right")
    for key in figures["local"]:
        table.add_row(key, *(str(each[key]) for each in figures.values()))
    Console(stderr=True).print(table)
    return {
        "ratio": round(figures["transfer_queue"]["groups_per_s"] / figures["local"]["groups_per_s"], 3),
        **figures,
        "config": {
            "trajectories": count,
            "tokens": TOKENS,
            "batch_groups": BATCH,
            "units": TransferQueueConfig().units,
        },
        "machine": machine("turnwise-rl", "numpy", "orjson", "ray", "transferqueue", "tensordict"),
    }


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=1, quick_repeats=1))
    report(measure(QUICK if arguments.quick else TRAJECTORIES, arguments.repeats))


if __name__ == "__main__":
    sys.exit(main())
