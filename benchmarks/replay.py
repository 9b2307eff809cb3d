"""What durability costs: trajectories journalled, sampled and packed, in bounded memory.

10,000 trajectories of 4,096 tokens, half of them sampled, in groups of 8: each is written and noted in the journal,
its group is put into the buffer, batches are sampled, fetched (half of them from disk: ``replay.memory_mb`` holds half
of what waits), made into rows and packed into micro-batches. ``mb_per_s`` is payload bytes (10**6 bytes of
their JSON a MB) over the CPU seconds of the whole line; ``rss_mb`` is how much the resident memory of the
process grew at most.

The peer is a plain file of pickles, one a trajectory: appended, read back, packed; no checksum, no journal, no bound.
"""

from __future__ import annotations

import asyncio
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.measure import machine, parse, parser, report
from turnwise import Trajectory, to_samples
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.tasks import Task
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import TrainRow
from turnwise.trajectory import Segment, TrajectoryGroup
from turnwise.trajectory_file import TRAJECTORIES as TRAJECTORIES_FILE

TRAJECTORIES, TOKENS, MEMBERS, BATCH, WAITING = 10_000, 4096, 8, 16, 64
MEMORY_MB = 10
MICRO_BATCH = 32_768
BARS = {"mb_per_s": 50.0, "rss_mb": 512.0}


def trajectory(group: str, number: int, draw: np.random.Generator) -> Trajectory:
    """Return one of eight turns, half of whose ids are sampled."""
    size = TOKENS // 16
    segments = []
    for index in range(16):
        ids = draw.integers(0, 150_000, size, dtype=np.int32)
        if index % 2 == 0:
            messages: Any = ({"role": "user", "content": "some words of a tool. " * 40},)
            segments.append(Segment(index, index - 1, "context", ids, messages=messages))
        else:
            messages = ({"role": "assistant", "content": "some words of a model. " * 40},)
            logprobs = -draw.random(size, dtype=np.float32)
            spans = ((0, 0, size),)
            segments.append(Segment(index, index - 1, "sampled", ids, messages, f"t{index}", logprobs, spans, "stop"))
    name = f"0-{group}/{number}.0"
    return Trajectory(name, name, f"0-{group}", group, segments=segments, rewards=[(None, "score", float(number % 2))])


def rss_mb() -> float:
    """Return the largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def packed(trajectories: Iterator[Trajectory]) -> int:
    """Make rows and micro-batches; return how many tokens are trained."""
    rows = [TrainRow(row) for played in trajectories for row in to_samples(played).rows]
    return sum(batch.trained_tokens for batch in pack(rows, MICRO_BATCH, share_prefixes=True))


async def ours(directory: Path, count: int) -> dict[str, float]:
    """Walk the whole line; what makes the trajectories is not counted."""
    journal = Journal.open(directory)
    buffer = LocalReplayBuffer(journal=journal, memory_mb=MEMORY_MB)
    draw, spent, trained, step = np.random.default_rng(0), 0.0, 0, 0
    groups, rss_before, size = count // MEMBERS, rss_mb(), 0
    for number in range(groups):
        name = f"g{number}"
        members = [trajectory(name, member, draw) for member in range(MEMBERS)]
        size += sum(len(played.to_bytes()) for played in members)
        start = time.process_time()
        buffer.expect(RolloutRequest(Task(name, "go"), group_size=MEMBERS), 0)
        for member, played in enumerate(members):
            journal.write(played)
            journal.member(f"train-{name}-e0", f"0-{name}", member, [played])
        await buffer.put(TrajectoryGroup(f"0-{name}", name, members))
        if number + 1 == groups or (number + 1) % WAITING == 0:
            while buffer.ready("train"):
                step += 1
                ref, _ = await buffer.sample(step, "train", min(BATCH, len(buffer.ready("train"))))
                trained += packed(played for group in await buffer.fetch(ref) for played in group.trajectories)
                await buffer.release(ref)
        spent += time.process_time() - start
    start = time.process_time()
    await journal.sync()
    spent += time.process_time() - start
    journal.close()
    stored = (directory / TRAJECTORIES_FILE).stat().st_size / 1e6
    if trained != count // MEMBERS * MEMBERS * TOKENS // 2:
        raise SystemExit(f"{trained} tokens were trained")
    return {
        "mb_per_s": round(size / 1e6 / spent, 1),
        "rss_mb": round(rss_mb() - rss_before, 1),
        "mb": round(size / 1e6, 1),
        "stored_mb": round(stored, 1),
    }


def plain(directory: Path, count: int) -> dict[str, float]:
    """Append pickles to a file, read them back and pack them; in MB of our payloads a second."""
    draw, spent, size, path = np.random.default_rng(0), 0.0, 0, directory / "plain.pickle"
    with path.open("ab") as file:
        for number in range(count):
            played = trajectory(f"g{number // MEMBERS}", number % MEMBERS, draw)
            size += len(played.to_bytes())
            start = time.process_time()
            pickle.dump(played, file, protocol=pickle.HIGHEST_PROTOCOL)
            file.flush()
            spent += time.process_time() - start
    start = time.process_time()
    with path.open("rb") as file:
        for first in range(0, count, BATCH * MEMBERS):
            packed(pickle.load(file) for _ in range(min(BATCH * MEMBERS, count - first)))
    spent += time.process_time() - start
    return {"plain_mb_per_s": round(size / 1e6 / spent, 1)}


def measure(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(ours(Path(folder), count))
        figures |= plain(Path(folder), count)
    table = Table(title=f"{count} trajectories of {TOKENS} tokens, {MEMORY_MB} MiB for groups that wait")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for key, value in figures.items():
        table.add_row(key, str(value))
    Console(stderr=True).print(table)
    return {
        **figures,
        "bars": BARS,
        "held": {"mb_per_s": figures["mb_per_s"] >= 50.0, "rss_mb": figures["rss_mb"] <= BARS["rss_mb"]},
        "config": {"trajectories": count, "tokens": TOKENS, "memory_mb": MEMORY_MB, "batch_groups": BATCH},
        "machine": machine("turnwise-rl", "numpy", "orjson"),
    }


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=1, quick_repeats=1))
    report(measure(1024 if arguments.quick else TRAJECTORIES))


if __name__ == "__main__":
    sys.exit(main())
