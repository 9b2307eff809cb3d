"""``turnwise eval`` against a real vLLM: the same command, and what the built-in server says of the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.trainer.lookup_run import Turnwise, lines, silent
from turnwise.inference.vllm import VLLMReplica
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import read_trajectories

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]
TASKS = 24
TIE = 1e-3


def evaluate(checkpoint: Path, out: Path, *more: str) -> dict[str, Any]:
    tasks = f"turnwise.envs.basic.lookup:tasks?n={TASKS}&split=test"
    command = ("eval", "lookup", "-m", str(checkpoint), "-t", tasks, "-n", "2", "-o", str(out))
    limits = ("rollout.max_turns=4", "rollout.max_tokens_per_turn=48")
    with Turnwise(out.with_suffix(".log"), *command, *limits, *more) as process:
        process.wait()
    assert process.returncode == 0, process.output()
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def greedy(out: Path) -> dict[str, Trajectory]:
    trajectories = read_trajectories(out / "trajectories.twz")
    return {trajectory.task_id: trajectory for trajectory in trajectories if "greedy" in trajectory.group_id}


def parts_at_a_tie(model: Any, theirs: Trajectory, ours: Trajectory) -> bool:
    """Return whether the first id in which two greedy episodes differ was a near tie, by the model's own forward."""
    one, other = theirs.segments[0].token_ids.astype(np.int64), ours.segments[0].token_ids.astype(np.int64)
    length = min(len(one), len(other))
    position = int(np.flatnonzero(one[:length] != other[:length])[0])
    with torch.inference_mode():
        best = model(input_ids=torch.from_numpy(one[:position]).unsqueeze(0)).logits[0, -1].float().topk(2)
    return bool(best.values[0] - best.values[1] < TIE) and {int(one[position]), int(other[position])} == set(
        best.indices.tolist()
    )


async def test_an_evaluation_is_the_same_whoever_serves(
    vllm: VLLMReplica, checkpoint: Path, reference: Any, tmp_path: Path
) -> None:
    # Both in this thread: the server needs nothing of the loop.
    theirs = evaluate(checkpoint, tmp_path / "vllm", "inference.engine=vllm", f"inference.url={vllm.url}")
    ours = evaluate(checkpoint, tmp_path / "builtin")
    for summary in (theirs, ours):
        assert summary["sampled"]["success"]["episodes"] == 2 * TASKS
        assert summary["greedy"]["success"]["episodes"] == TASKS
    # It was trained: greedily it solves tasks, and an equal share of none would say nothing.
    assert ours["greedy"]["success"]["mean"] > 0.3

    by_vllm, by_builtin = greedy(tmp_path / "vllm"), greedy(tmp_path / "builtin")
    assert by_vllm.keys() == by_builtin.keys()
    differing = 0
    for task, trajectory in by_builtin.items():
        same = [one.token_ids.tolist() for one in by_vllm[task].segments] == [
            one.token_ids.tolist() for one in trajectory.segments
        ]
        assert same or parts_at_a_tie(reference, by_vllm[task], trajectory)
        assert not same or by_vllm[task].rewards == trajectory.rewards
        differing += not same
    assert abs(theirs["greedy"]["success"]["mean"] - ours["greedy"]["success"]["mean"]) * TASKS <= differing

    report = audit_run(tmp_path / "vllm", console=silent())
    assert report.contradictions == []
    assert report.counts["trajectories"] == 3 * TASKS
    versions = {
        span[0]
        for trajectory in by_vllm.values()
        for segment in trajectory.segments
        for span in segment.weight_versions
    }
    assert versions == {3}
    assert len(lines(tmp_path / "vllm" / "episodes.jsonl")) == 3 * TASKS
