"""Steps that start more groups than they train, and steps that do not wait for their last groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.envs.run_envs import Graded
from support.trainer.lookup_run import MEMBERS, lines, silent, train_config
from turnwise.rollout.audit import audit_files
from turnwise.rollout.records import read_batches
from turnwise.trainer.run.run import TrainRun
from turnwise.trainer.train import run_train
from turnwise.trainer.training import Training
from turnwise.trajectory_file import read_trajectories
from turnwise.types import StopReason


class Plan:
    """What the episodes of a run wait for."""

    def __init__(self) -> None:
        self.begun = 0
        self.later, self.closed = asyncio.Event(), asyncio.Event()


PLANS: dict[str, Plan] = {}


class Straggling(Graded):
    """The first episode of a run waits: for ever, or until one of the second step begins, which wait for it then."""

    def __init__(self, key: str, first: int | None = None) -> None:
        self.plan, self.first, self.number = PLANS[key], first, 0

    async def reset(self, task=None, *, seed=None):
        plan = self.plan
        plan.begun += 1
        self.number = plan.begun
        if self.number == 1:
            await (asyncio.Event() if self.first is None else plan.later).wait()
        elif self.first is not None and self.number > self.first:
            plan.later.set()
            await plan.closed.wait()
        return await super().reset(task, seed=seed)

    def close(self):
        if self.number == 1:
            self.plan.closed.set()
        return super().close()


def trained(model: Path, runs: Path, first: int | None = None, **changes: Any) -> Path:
    PLANS[str(runs)] = Plan()
    env = {"name": f"{__name__}:Straggling", "config": {"key": str(runs), "first": first}}
    config = train_config(model, runs, rollout={"env": env}, **changes)
    return run_train(config, console=silent()).directory


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]


def test_over_sampling_trains_the_first_groups_and_cancels_the_others(lookup_model: Path, tmp_path: Path) -> None:
    run = trained(lookup_model, tmp_path, batch={"groups": 2, "over_sample": 1.5})
    first, second = steps_of(run)
    assert first["straggler/cancelled"] == first["rollout/cancelled_episodes"] == 1
    assert first["rollout/wasted_tokens"] > 0, "the three that had finished"
    for step in (first, second):
        assert step["batch/trajectories"] == 2 * MEMBERS
        assert step["replay/staleness_max"] == 0
    trajectories = list(read_trajectories(run / "trajectories.twz"))
    cancelled = [trajectory for trajectory in trajectories if trajectory.stop_reason is StopReason.CANCELLED]
    assert len({trajectory.group_id for trajectory in trajectories}) == 6
    rows = {row.trajectory for row in read_batches(run / "batches.jsonl").rows}
    lost = {trajectory.group_id for trajectory in cancelled}
    assert rows.isdisjoint(trajectory.id for trajectory in trajectories if trajectory.group_id in lost)
    assert audit_files(run).sound


def test_the_tail_of_a_batch_is_carried_into_the_next_step(lookup_model: Path, tmp_path: Path) -> None:
    batch = {"groups": 2, "tail": {"seconds": 0, "share": 0.5}}
    replay = {"strategy": "bounded", "max_staleness": 1}
    run = trained(lookup_model, tmp_path, first=2 * MEMBERS, batch=batch, replay=replay)
    first, second = steps_of(run)
    assert first["straggler/cut_groups"] == first["straggler/carried"] == 1
    assert first["batch/trajectories"] == second["batch/trajectories"] == MEMBERS
    assert (first["replay/staleness_max"], second["replay/staleness_max"]) == (0, 1)
    assert "rollout/cancelled_episodes" not in second
    trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(run / "trajectories.twz")}
    rows = {row.trajectory for row in read_batches(run / "batches.jsonl").rows}
    versions = {
        name: {version for segment in trajectories[name].segments for version, _, _ in segment.weight_versions}
        for name in rows
    }
    assert {1} in versions.values(), "the one that was waited for sampled with the weights of the first step"
    assert audit_files(run).sound


@pytest.mark.long
@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_the_tail_is_carried_beside_the_update(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    """The first episode waits until the group that replaces the one of step 1 is requested."""
    batch = {"groups": 2, "tail": {"seconds": 0, "share": 0.5}}
    replay = {"max_staleness": 2, "ahead": 0}
    run = trained(lookup_model, tmp_path, first=2 * MEMBERS, batch=batch, replay=replay, mode=mode)
    first, second = steps_of(run)
    assert first["straggler/cut_groups"] == first["straggler/carried"] == 1
    assert first["batch/trajectories"] == MEMBERS
    assert (first["replay/staleness_max"], second["replay/staleness_max"]) == (0, 1)
    assert "rollout/cancelled_episodes" not in second
    rows = {row.trajectory: row.step for row in read_batches(run / "batches.jsonl").rows}
    groups = [{name.rpartition("/")[0] for name, step in rows.items() if step == which} for which in (1, 2)]
    assert len(groups[0]) == 1
    assert groups[0].isdisjoint(groups[1])
    assert audit_files(run).sound


def test_the_tail_is_cancelled_where_no_group_of_older_weights_is_trained(lookup_model: Path, tmp_path: Path) -> None:
    run = trained(lookup_model, tmp_path, batch={"groups": 2, "tail": {"seconds": 0, "share": 0.5}}, steps=1)
    [step] = steps_of(run)
    assert step["straggler/cut_groups"] == step["straggler/cancelled"] == step["rollout/cancelled_episodes"] == 1
    assert "straggler/carried" not in step


@pytest.mark.long
def test_custom_loop_gets_its_tasks_or_the_first_groups_to_finish(lookup_model: Path, tmp_path: Path) -> None:
    sizes = []

    async def own(run: TrainRun) -> None:
        training = Training(run)
        tasks = training.train_tasks[:3]
        groups = await training.rollouts(tasks)
        # The first episode waits for ever: the tail does not wait for its group, and nothing takes its place.
        assert {group.task_id for group in groups} == {task.id for task in tasks[1:]}
        await training.learn(groups)
        while not training.finished:
            groups = await training.rollouts(group_size=3)
            sizes.append([len(group.trajectories) for group in groups])
            await training.learn(groups)

    PLANS[str(tmp_path)] = Plan()
    env = {"name": f"{__name__}:Straggling", "config": {"key": str(tmp_path)}}
    batch = {"groups": 2, "over_sample": 1.5, "tail": {"seconds": 1, "share": 0.6}}
    config = train_config(lookup_model, tmp_path, rollout={"env": env}, batch=batch)
    run = run_train(config, loop=own, console=silent()).directory
    assert sizes == [[3, 3]]
    assert steps_of(run)[0]["straggler/cancelled"] == 1
    assert audit_files(run).sound
