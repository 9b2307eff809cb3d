"""Runs whose episodes are forked: each sampled token is trained once, by any agent, killed at any moment."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.crash.runs import kill_at_random_events
from support.processes.warm import run_command
from support.trainer.lookup_run import environment, lines, silent, train_config
from turnwise.agents import Episode, rollout, within_budget
from turnwise.rollout.records import read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.metrics import meaning
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory import Trajectory, branch_paths
from turnwise.trajectory_file import read_trajectories
from turnwise.types import Message

KILLS = int(os.environ.get("TURNWISE_TEST_KILLS", "3"))
EXAMPLES = Path(__file__).parents[2] / "examples"
GRAPH = EXAMPLES / "langgraph_agent" / "graph.py"
AGENTS: dict[str, dict[str, Any]] = {
    "react": {"name": "react"},
    "graph": {"name": "langgraph", "config": {"graph": f"{GRAPH}:make_graph"}},
}


def forked_config(model: Path, runs: Path, **changes: Any) -> TrainConfig:
    """Return the configuration of a run of seconds whose episodes have three branches besides the first."""
    rollout = {"group_size": 2, "tree": {"branches": 3, "rounds": 2}} | changes.pop("rollout", {})
    algorithm = {"credit": "tree_value", "drop_zero_variance": False}
    return train_config(model, runs, rollout=rollout, algorithm=algorithm, **changes)


def check_trees(run: Path) -> list[Trajectory]:
    """Check that siblings begin at one turn, and that all that branches sampled was trained once."""
    trained = [trajectory for trajectory in read_trajectories(run / "trajectories.twz") if trajectory.error is None]
    for trajectory in trained:
        branch_paths(trajectory.branches)
        for branch in trajectory.branches[1:]:
            assert branch.again is not None
    owned = [(row.trajectory, row.leaf) for row in read_batches(run / "batches.jsonl").rows]
    assert len(owned) == len(set(owned))
    return trained


@pytest.mark.parametrize("agent", ["react", pytest.param("graph", marks=pytest.mark.long)])
def test_a_run_of_trees_is_trained_and_sound(agent: str, lookup_model: Path, tmp_path: Path) -> None:
    run_train(forked_config(lookup_model, tmp_path, rollout={"agent": AGENTS[agent]}), console=silent())
    run = tmp_path / "run"
    episodes = check_trees(run)
    assert len(episodes) == 8
    assert [len(trajectory.branches) for trajectory in episodes] == [4] * 8
    report = audit_run(run, at_most=16, console=silent())
    assert report.contradictions == []
    assert report.counts["sampled tokens that cannot be recomputed"] == 0
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    for step in steps:
        # Where all branches of a step earned the same, nothing is trained.
        assert step.get("gap/max", 0.0) < 1e-4
        assert step["batch/trajectories"] == 4
        assert step["tree/branches"] == 4
        assert [name for name in step if name not in ("kind", "step") and meaning(name) is None] == []
    sampled = sum(trajectory.sampled_tokens for trajectory in episodes)
    assert sum(step["batch/trained_tokens"] for step in steps) == sampled


@rollout
async def forks_itself(episode: Episode) -> None:
    """Play two ways from the second turn on."""

    async def go_on(branch: Episode, messages: list[Message]) -> None:
        with within_budget(branch):
            while True:
                message = await branch.session.chat(messages, branch.tools)
                result = await branch.step(message)
                if result.terminated or result.truncated:
                    return
                messages += [message, *result.observation]

    first = await episode.session.chat(episode.observation, episode.tools)
    result = await episode.step(first)
    if not (result.terminated or result.truncated):
        messages = [*episode.observation, first, *result.observation]
        await asyncio.gather(*(go_on(branch, list(messages)) for branch in (episode, await episode.fork())))


@pytest.mark.long
def test_a_run_whose_agent_forks_is_trained_and_sound(lookup_model: Path, tmp_path: Path) -> None:
    rollout = {"agent": {"name": f"{__name__}:forks_itself"}}
    algorithm = {"credit": "tree_value", "drop_zero_variance": False}
    run_train(train_config(lookup_model, tmp_path, rollout=rollout, algorithm=algorithm), console=silent())
    episodes = check_trees(tmp_path / "run")
    assert any(len(trajectory.branches) == 2 for trajectory in episodes)
    report = audit_run(tmp_path / "run", at_most=16, console=silent())
    assert report.contradictions == []
    assert report.counts["sampled tokens that cannot be recomputed"] == 0
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert sum(step["batch/trained_tokens"] for step in steps) == sum(
        trajectory.sampled_tokens for trajectory in episodes
    )


@pytest.mark.long
def test_a_run_of_trees_survives_kills_at_random_events(lookup_model: Path, tmp_path: Path) -> None:
    config = forked_config(lookup_model, tmp_path, steps=6, mode="colocate_async")
    run = tmp_path / "run"
    kill_at_random_events(config, KILLS, seed=11)
    run_train(config, console=silent())
    check_trees(run)
    assert audit_run(run, at_most=8, console=silent()).contradictions == []
    trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(run / "trajectories.twz")}
    rows = read_batches(run / "batches.jsonl").rows
    assert {row.step for row in rows} == set(range(1, 7))
    groups = {(trajectories[row.trajectory].group_id, row.step) for row in rows}
    # Each step trained two groups: none was lost, none came twice.
    assert len(groups) == len({group for group, _ in groups}) == 12


@pytest.mark.long
def test_the_example_runs_in_seconds(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "tree_rollouts" / "main.py"), "--smoke", "--runs", str(tmp_path)]
    done = run_command(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "filed, sampled" in done.stdout
    trees = check_trees(tmp_path / "trees-seed0")
    trained = [trajectory for trajectory in trees if trajectory.partition == "train"]
    assert [len(trajectory.branches) for trajectory in trained] == [8, 8]
