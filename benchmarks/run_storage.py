"""How much room trajectories take on disk, and how fast a large run opens.

Trajectories of agents (20 turns with a tool) and of a game (3 short turns), in groups of 4 that share their task's
prompt. Words are those of the documentation, an id a word, so texts and ids repeat as in prose; log-probabilities
have all bits of a float32, as a sampler's have. ``bytes_ratio`` is the worse of both kinds: bytes of the file and its
index over those of the ids (int32) and the texts (messages and tools), each trajectory compressed by zstd at the same
level on its own: what must be kept at least where one trajectory is read without the others. Log-probabilities,
rewards and all other fields are in the file and not in what it is compared with.

``open_s`` is how long 100,000 trajectories of the game take to open (``--quick``: 20,000), in a file whose pages the
system may have in memory; ``read_ms`` the 99th percentile of reading one of them after that, drawn at random.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from harness.measure import ROOT, machine, parse, parser, report
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryFile, TrajectoryWriter, index_path

COUNT, QUICK_COUNT, OF_A_KIND, MEMBERS, LEVEL = 100_000, 20_000, 400, 4, 3
READS = 500
KINDS = {
    "agent": {"turns": 20, "system": 400, "prompt": 80, "said": 150, "answer": 400},
    "game": {"turns": 3, "system": 120, "prompt": 20, "said": 20, "answer": 15},
}
BARS = {"bytes_ratio": 1.3, "open_s": 1.0, "read_ms": 20.0}


class Words:
    """Stretches of the documentation, as text and ids."""

    def __init__(self) -> None:
        texts = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
        self.words = re.findall(r"\s*\S+", texts)
        numbers = {word: number for number, word in enumerate(dict.fromkeys(self.words))}
        ids = np.random.default_rng(0).permutation(150_000).astype(np.int32)
        self.ids = ids[[numbers[word] for word in self.words]]
        self.draw = np.random.default_rng(1)

    def some(self, count: int) -> tuple[str, np.ndarray[Any, Any]]:
        """Return so many words in a row."""
        at = int(self.draw.integers(0, len(self.words) - count))
        return "".join(self.words[at : at + count]), self.ids[at : at + count]

    def logprobs(self, count: int) -> np.ndarray[Any, Any]:
        """Return log-probabilities: four of ten are nearly 0."""
        draw = self.draw
        return (-draw.exponential(1, count) * (draw.random(count) < 0.6) - draw.exponential(1e-3, count)).astype("f4")


def trajectories(kind: str, count: int) -> Iterator[Trajectory]:
    """Yield trajectories of a kind."""
    words, shape = Words(), KINDS[kind]
    system, system_ids = words.some(shape["system"])
    functions = [{"name": f"tool_{number}", "description": words.some(30)[0]} for number in range(3)]
    tools = tuple({"type": "function", "function": each} for each in functions)
    for number in range(count):
        if number % MEMBERS == 0:
            prompt, prompt_ids = words.some(shape["prompt"])
        messages = ({"role": "system", "content": system}, {"role": "user", "content": prompt})
        ids = np.concatenate([system_ids, prompt_ids])
        segments = [Segment(0, -1, "context", ids, messages, tools=tools)]
        for turn in range(shape["turns"]):
            text, ids = words.some(shape["said"])
            name, index = f"t{turn}", len(segments)
            said: Any = ({"role": "assistant", "content": text, "turn_id": name},)
            logprobs = words.logprobs(len(ids))
            spans = ((3, 0, len(ids)),)
            segments.append(Segment(index, index - 1, "sampled", ids, said, name, logprobs, spans, "stop"))
            if turn + 1 < shape["turns"]:
                text, ids = words.some(shape["answer"])
                heard = ({"role": "tool", "content": text, "tool_call_id": f"c{turn}"},)
                segments.append(Segment(index + 1, index, "context", ids, heard))
        group = f"0-val-task-{number // MEMBERS}-e0~sampled"
        name = f"{group}/{number % MEMBERS}.0"
        measured = {f"t{turn}": {"tool_seconds": float(words.draw.random())} for turn in range(shape["turns"])}
        begun = 1.7e9 + number
        times = {
            f"t{turn}": (begun + turn, round(begun + turn + words.draw.random(), 4)) for turn in range(shape["turns"])
        }
        yield Trajectory(
            name, name, group, f"task-{number // MEMBERS}", segments=segments, turn_metrics=measured, turn_times=times,
            rewards=[(f"t{shape['turns'] - 1}", "exact", float(number % 2))], metrics={"seconds": 1.5},
        )  # fmt: skip


def plain_bytes(trajectory: Trajectory, compressor: zstandard.ZstdCompressor) -> int:
    """Return the bytes of a trajectory's ids and texts under zstd."""
    ids = b"".join(segment.token_ids.tobytes() for segment in trajectory.segments)
    texts = [message["content"] for segment in trajectory.segments for message in segment.messages]
    return len(compressor.compress(ids + "".join(texts).encode() + orjson.dumps(trajectory.segments[0].tools)))


def sizes(folder: Path, kind: str) -> dict[str, float]:
    """Write trajectories of a kind; return bytes a trajectory, ours and of what they are compared with."""
    file, compressor = folder / kind / TRAJECTORIES, zstandard.ZstdCompressor(level=LEVEL)
    writer, plain, json, spent = TrajectoryWriter(file), 0, 0, 0.0
    for each in trajectories(kind, OF_A_KIND):
        plain += plain_bytes(each, compressor)
        json += len(each.to_bytes())
        begun = time.process_time()
        writer.write(each)
        spent += time.process_time() - begun
    writer.close()
    stored, index = file.stat().st_size, index_path(file).stat().st_size
    return {
        "ratio": (stored + index) / plain, "bytes": stored / OF_A_KIND, "index_bytes": index / OF_A_KIND,
        "plain_bytes": plain / OF_A_KIND, "json_bytes": json / OF_A_KIND, "write_ms": 1000 * spent / OF_A_KIND,
    }  # fmt: skip


def opened(folder: Path, count: int) -> dict[str, float]:
    """Write a large run; return how long it takes to open, and to read one trajectory."""
    file = folder / "large" / TRAJECTORIES
    writer, made = TrajectoryWriter(file), list(trajectories("game", OF_A_KIND))
    for number in range(count):
        each = made[number % OF_A_KIND]
        writer.write(replace(each, id=f"{number}-{each.id}", episode_id=f"{number}-{each.id}"))
    writer.close()
    begun = time.perf_counter()
    large = TrajectoryFile(file)
    opening = time.perf_counter() - begun
    if len(large.entries) != count:
        raise SystemExit(f"{len(large.entries)} trajectories were found of {count}")
    times = []
    for number in np.random.default_rng(2).integers(0, count, READS):
        begun = time.perf_counter()
        found = large.read(large.entries[number])
        times.append(time.perf_counter() - begun)
        if not found.id.startswith(f"{number}-"):
            raise SystemExit(f"trajectory {number} is {found.id}")
    large.close()
    return {"open_s": opening, "read_ms": 1000 * float(np.quantile(times, 0.99)), "mb": file.stat().st_size / 1e6}


def measure(count: int) -> dict[str, Any]:
    """Return all figures."""
    with tempfile.TemporaryDirectory() as place:
        kinds = {kind: sizes(Path(place), kind) for kind in KINDS}
        large = opened(Path(place), count)
    for kind, figures in kinds.items():
        print(kind, {name: round(value, 3) for name, value in figures.items()}, file=sys.stderr)
    found = {"bytes_ratio": max(each["ratio"] for each in kinds.values()), **large}
    return {
        **{name: round(value, 4) for name, value in found.items()},
        "kinds": kinds,
        "bars": BARS,
        "held": {name: found[name] <= bar for name, bar in BARS.items()},
        "config": {"trajectories": count, "level": LEVEL, "of_a_kind": OF_A_KIND, "kinds": KINDS},
        "machine": machine("turnwise-rl", "numpy", "orjson", "zstandard"),
    }


def main() -> None:
    """Measure and report."""
    arguments = parse(parser(__doc__ or "", repeats=1, quick_repeats=1))
    report(measure(QUICK_COUNT if arguments.quick else COUNT))


if __name__ == "__main__":
    main()
