"""The main job reaches its figures although it is killed on the way; what it leaves passes the audit."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support.processes.warm import WarmPopen, run_command
from support.trainer.job_bars import KINDS, hold_to_bars, mostly_fails, success
from support.trainer.lookup_run import take_warm
from support.trainer.ranks import pair_of_ranks
from turnwise.config import load_config
from turnwise.rollout.records import read_batches
from turnwise.trainer.batch.experience import build_experience, collect
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.fsdp_learner import FSDPLearner
from turnwise.trainer.learn.learner import Learner, open_learner
from turnwise.trainer.learn.update import update_policy
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.trajectory_file import read_trajectories

MAIN = Path(__file__).parents[2] / "examples" / "lookup" / "main.py"
pytestmark = [pytest.mark.long, pytest.mark.alike("lookup", "main"), pytest.mark.xdist_group("main-job")]


def start(runs: Path, name: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(MAIN), "--runs", str(runs), "--seed", "0", "--name", name, *more]
    with (runs / f"{name}.log").open("ab") as log:
        return WarmPopen(command, stdout=log, stderr=log, start_new_session=True)


def finish(process: subprocess.Popen[bytes], runs: Path, name: str) -> dict[str, Any]:
    status = process.wait()
    assert status == 0, (runs / f"{name}.log").read_text()[-3000:]
    return json.loads((runs / name / "summary.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("main-job")
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def summary(runs: Path, warm_lookup: Path) -> dict[str, Any]:
    """The main job by the command of ``make train`` (``test_metadata.py``), killed in the middle and begun again."""
    take_warm(warm_lookup, runs / "seed0")
    process = start(runs, "seed0")
    metrics = runs / "seed0" / "metrics.jsonl"
    try:
        while process.poll() is None and not (metrics.exists() and '"step":14,' in metrics.read_text()):
            time.sleep(0.1)
        assert process.poll() is None, (runs / "seed0.log").read_text()[-3000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return finish(start(runs, "seed0"), runs, "seed0")


def test_policy_learns_to_use_the_tools(summary: dict[str, Any]) -> None:
    mostly_fails(summary)
    hold_to_bars(summary, sampled=0.88, greedy=0.97)


def test_no_process_took_more_than_1_2_gigabytes(summary: dict[str, Any]) -> None:
    # The largest of all descendants that have ended, in KiB.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= 1.2e9 / 1024


def test_audit_of_the_run_passes(runs: Path, summary: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "turnwise", "audit", str(runs / "seed0")]
    result = run_command(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no contradictions" in result.stdout


def test_only_the_steps_lost_by_the_kill_are_repeated(runs: Path, summary: dict[str, Any]) -> None:
    records = [json.loads(line) for line in (runs / "seed0" / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if record["kind"] == "train"]
    # Resumed after the checkpoint of step 10: some steps were done twice, none was left out.
    assert steps[-1] == summary["steps"]
    assert sorted(set(steps)) == list(range(1, summary["steps"] + 1))
    assert steps.count(11) == 2
    assert steps.count(10) == 1
    # The first evaluation is that of the first part; none was made anew by the second.
    evaluations = [record for record in records if record["kind"] == "eval"]
    assert [record["step"] for record in evaluations] == [0, summary["steps"]]
    for kind in KINDS:
        assert summary["before"][kind] == evaluations[0][kind]


def recorded_steps(run: Path, config: TrainConfig, steps: int) -> list[list[TrainRow]]:
    """Return the rows that the first steps of a run trained, from its files."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in read_trajectories(run / "trajectories.twz"):
        groups[trajectory.group_id].append(trajectory)
    group_of = {trajectory.id: name for name, its in groups.items() for trajectory in its}
    trained: dict[int, dict[str, None]] = defaultdict(dict)
    for row in read_batches(run / "batches.jsonl").rows:
        trained[row.step][group_of[row.trajectory]] = None
    differences = []
    for step in range(1, steps + 1):
        its = [TrajectoryGroup(name, groups[name][0].task_id, groups[name]) for name in trained[step]]
        collected = collect(its, max_tokens_per_row=config.batch.max_tokens_per_row)
        differences.append(build_experience(collected, config.algorithm, temperature=config.rollout.temperature).rows)
    return differences


def assert_ranks_train_alike(run: Path) -> None:
    """Train what the first five steps of a run trained, in one process and on ranks, from the same weights."""
    config = load_config(TrainConfig, run / "config.yaml")
    with pair_of_ranks(2) as two, pair_of_ranks(4) as four:
        learners: list[Learner] = [
            open_learner(config.policy, config.optimizer_steps),
            *(FSDPLearner(ranks, config.policy, config.optimizer_steps) for ranks in (two, four)),
        ]
        for step, rows in enumerate(recorded_steps(run, config, 5), start=1):
            alone, *sharded = (
                update_policy(learner, rows, config.algorithm, config.batch, seed=step) for learner in learners
            )
            assert alone["train/tokens"] > 100
            assert alone["train/grad_norm"] > 0
            for metrics in sharded:
                # The largest of thousands of tokens shows what weights that differ by 1e-6 do to one of them.
                largest = {name: metrics.pop(name) for name in ("gap/max", "train/ratio_max")}
                assert largest == pytest.approx({name: alone[name] for name in largest}, abs=1e-4)
                # Of another sample of the weights where they are sharded.
                assert metrics.pop("train/update_ratio") == pytest.approx(alone["train/update_ratio"], rel=0.3)
                assert metrics == pytest.approx({name: alone[name] for name in metrics}, abs=1e-5)
        first = load_file(config.policy.model.path / "model.safetensors")
        weights, *other_weights = (dict(learner.export_weights()) for learner in learners)
        assert max(float((weight - first[name]).detach().abs().max()) for name, weight in weights.items()) > 1e-3
        for other in other_weights:
            assert other.keys() == weights.keys()
            assert max(float((weight - weights[name]).detach().abs().max()) for name, weight in other.items()) < 1e-5


def test_first_five_steps_on_ranks_equal_those_of_one_process(runs: Path, summary: dict[str, Any]) -> None:
    assert_ranks_train_alike(runs / "seed0")


@pytest.mark.parametrize("mode", ["colocate", "separate"])
def test_asynchronous_mode_reaches_the_success_of_the_synchronous_mode(
    runs: Path, warm_lookup: Path, summary: dict[str, Any], mode: str
) -> None:
    take_warm(warm_lookup, runs / mode)
    other = finish(start(runs, mode, "--also", f"{mode}.yaml"), runs, mode)
    ends = {name: success(run_summary["after"], "sampled") for name, run_summary in (("sync", summary), (mode, other))}
    steps = [json.loads(line) for line in (runs / mode / "metrics.jsonl").read_text().splitlines()]
    lags = [step["lag/max"] for step in steps if step["kind"] == "train"]
    print(f"{ends}, lag at most {max(lags):g}, {other['wall_s']:.0f} s wall, {other['cpu_s']:.0f} CPU-s")
    assert abs(ends[mode] - ends["sync"]) <= 0.03
    # It was asynchronous, and never more than its bound.
    assert max(lags) == 1
