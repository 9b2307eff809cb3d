"""Runs that a budget of tokens or time ends, and that are resumed with a larger one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.trainer.lookup_run import lines, silent, train_config
from turnwise.trainer.run.run import open_run
from turnwise.trainer.train import run_train


def sampled_tokens(records: list[dict[str, Any]]) -> int:
    segments = [segment for record in records for segment in record["segments"]]
    return sum(len(segment["token_ids"]) for segment in segments if segment["kind"] == "sampled")


def rates(run: Path) -> list[float]:
    return [record["lr/adamw"] for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.long
def test_token_budget_ends_a_run_after_a_step_and_a_larger_budget_resumes_the_run(
    lookup_model: Path, tmp_path: Path
) -> None:
    free: dict[str, Any] = {"steps": None, "policies": {"main": {"schedule": {"kind": "linear"}}}}
    config = train_config(lookup_model, tmp_path, **free, budget={"sampled_tokens": 1}, rollout={"concurrency": 1})
    summary = run_train(config, console=silent())
    assert (summary.steps, summary.ended_by) == (1, "sampled_tokens")
    run = tmp_path / "run"
    state = json.loads((run / "checkpoints" / "step_000001" / "trainer_state.json").read_text())
    first = lines(run / "trajectories.twz")
    sampled = sampled_tokens(first)
    assert state["spent"]["sampled_tokens"] == summary.spent["sampled_tokens"] == sampled
    assert state["spent"]["wall_time"] > 0
    assert json.loads((run / "summary.json").read_text())["ended_by"] == "sampled_tokens"

    # Half of the new budget is spent. What the second step sampled before its update says how many steps there will be.
    more = config.model_copy(update={"budget": config.budget.model_copy(update={"sampled_tokens": 2 * sampled})})
    summary = run_train(more, console=silent())
    assert summary.ended_by == "sampled_tokens"
    assert summary.steps >= 2
    assert summary.spent["sampled_tokens"] >= 2 * sampled
    first_rate, resumed_rate, *_ = rates(run)
    assert first_rate == 1e-3
    later = lines(run / "trajectories.twz")[len(first) : 2 * len(first)]
    second = sampled_tokens(later)
    steps = 2 / ((sampled + second) / (2 * sampled))
    assert resumed_rate == pytest.approx(first_rate * (1 - 1 / math.ceil(steps)))


async def test_wall_time_includes_earlier_processes(lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(lookup_model, tmp_path, steps=3, budget={"wall_time": "1h"})
    async with open_run(config, tmp_path / "run", silent()) as run:
        assert run.ended is None
        # As if the process before had worked for an hour.
        run.budget.spend(wall_time=3600.0)
        assert run.ended == "wall_time"
