"""The process of one side of ``engine_vs_generate``: loads a checkpoint once, then runs what it is told and times it.

Run as ``python worker.py SIDE MODEL``. Requests come as JSON lines on standard input, answers go as JSON lines to what
was standard output (libraries print to standard error). CPU seconds are those of all threads of this process over the
call alone: neither loading nor the way of the request and the answer counts.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

SIDES = {"turnwise": "engines.turnwise_side", "generate": "engines.generate_side", "vllm": "engines.vllm_side"}


@dataclass(frozen=True, slots=True)
class Work:
    """What every side is asked to do.

    Attributes:
        prompts: Ids.
        new: How many ids to sample for each prompt, exactly.
        samples: Completions of each prompt.
        greedy: Temperature 0 instead of 1.
        setting: How a side that has a choice does it.
    """

    prompts: Sequence[Sequence[int]]
    new: Sequence[int]
    samples: int
    greedy: bool
    setting: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """Completions in the order of prompts, all samples of a prompt together, and the log-probabilities of their ids."""

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]


class Side(Protocol):
    """One engine."""

    def run(self, work: Work) -> Done:
        """Sample everything; what is timed."""

    def describe(self) -> dict[str, Any]:
        """Return the configuration and versions that matter."""


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, model = sys.argv[1:]
    side: Side = importlib.import_module(SIDES[name]).load(model)
    print(json.dumps({"config": side.describe()}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "score" in request:
            answer = importlib.import_module(SIDES[name]).score(side, request["score"])
        else:
            work = Work(**request)
            cpu, wall = time.process_time(), time.perf_counter()
            done = side.run(work)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            answer = {
                "cpu_s": cpu,
                "wall_s": wall,
                "tokens": [[int(token) for token in row] for row in done.tokens],
                "logprobs": [[float(logprob) for logprob in row] for row in done.logprobs],
            }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
