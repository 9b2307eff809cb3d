"""One side of ``async_modes.py``: a run in one mode, its servers on one core and its trainer on another.

Prints one JSON object: trajectories a second between the first weights that were synced and the last, and the largest
lag of what was trained. The environment answers after a time that is drawn from a Pareto distribution, cut off.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise.envs.basic.lookup import LookupEnv
from turnwise.envs.core import StepResult
from turnwise.types import Message

TURNS, GROUPS, MEMBERS = 4, 8, 4
TAIL, LEAST_S, MOST_S = 1.2, 0.03, 1.5
STALENESS = 2
SEED = 7
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "colocate": {"mode": "colocate_async", "replay": {"max_staleness": STALENESS, "ahead": STALENESS}},
    "separate": {"mode": "separate_async", "replay": {"max_staleness": STALENESS, "ahead": STALENESS}},
}
_DRAWS = random.Random(SEED)


class SlowEnv(LookupEnv):
    """``lookup``, whose tools answer after a time with a long tail; it pays at random: groups have differences."""

    async def step(self, action: Message) -> StepResult:
        """Answer later."""
        await asyncio.sleep(min(MOST_S, LEAST_S * _DRAWS.paretovariate(TAIL)))
        return await super().step(action)

    def score(self, final: Message | None) -> float:  # noqa: ARG002 - whatever was answered
        """Pay at random."""
        return float(_DRAWS.random() < 0.5)


def pin(pid: int, core: int) -> None:
    """Keep all threads of a process on one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


async def side(model: Path, mode: str, steps: int) -> dict[str, float]:
    from turnwise.ext.report.timeline import read_timeline
    from turnwise.trainer.config.train import TrainConfig
    from turnwise.trainer.loops.modes import train_as_configured
    from turnwise.trainer.observe.metrics import read_metrics
    from turnwise.trainer.observe.timeline import SYNC
    from turnwise.trainer.run.run import open_run

    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the servers, one for the trainer")
    with tempfile.TemporaryDirectory() as runs:
        config = TrainConfig.model_validate({
            "name": "run", "runs": runs, "steps": steps + 1, "seed": SEED,
            "tasks": "turnwise.envs.basic.lookup:tasks?n=64&split=train",
            "policies": {"main": {"model": {"path": model, "threads": 1}, "optim": {"lr": 1e-6}}},
            "rollout": {
                "env": {"name": f"{__file__}:SlowEnv"}, "group_size": MEMBERS, "max_turns": TURNS,
                "max_tokens_per_turn": 24, "concurrency": 256,
            },
            "batch": {"groups": GROUPS, "max_tokens_per_micro_batch": 2048},
            "checkpoint": {"every": steps + 1},
            **MODES[mode],
        })  # fmt: skip
        directory = Path(runs) / "run"
        async with open_run(config, directory, Console(file=io.StringIO())) as run:
            for replica in run.policy.fleet.replicas:
                assert replica.pid is not None
                pin(replica.pid, cores[1])
            pin(os.getpid(), cores[0])
            await train_as_configured(run)
        [part] = read_timeline(directory / "timeline.jsonl")
        synced = [span.end for span in part.spans if span.what == SYNC]
        logged = [each for each in read_metrics(directory / "metrics.jsonl") if each["kind"] == "train"]
    begin, end = synced[0], synced[-1]
    assert begin is not None
    assert end is not None
    return {
        "trajectories_per_s": steps * GROUPS * MEMBERS / (end - begin),
        "lag_max": max(each["lag/max"] for each in logged),
        "update_s": sum(each["time/update_s"] for each in logged[1:]) / steps,
        "step_s": (end - begin) / steps,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(side(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))))
