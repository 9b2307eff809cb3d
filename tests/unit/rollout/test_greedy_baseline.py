"""The greedy rollout beside a group: asked for by a request, no member, written down as what it is."""

from __future__ import annotations

from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.rollout.custom_managers import EXAMPLE
from turnwise.envs.core import Env, StepResult
from turnwise.envs.registration import register
from turnwise.errors import InferenceError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout import RolloutConfig, RolloutParts, RolloutRequest
from turnwise.rollout.config import SpecConfig
from turnwise.rollout.managers import create_manager
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup

RESETS: list[int] = []


class Greedy(Env):
    """Pays what was said."""

    async def reset(self, task=None, *, seed=None):
        RESETS.append(seed)
        return "say", {}

    async def step(self, action):
        return StepResult([], float(action["content"]), True, False, {})


register("test-greedy", Greedy)

MANAGERS = [None, EXAMPLE]


async def roll(manager: str | None, script: Any, size: int = 3, **options: Any) -> tuple[TrajectoryGroup, list[Any]]:
    RESETS.clear()
    renderer, written = ToyRenderer(), []
    buffer = LocalReplayBuffer()
    config = RolloutConfig(
        env=SpecConfig(name="test-greedy"), agent_loop_manager_class=manager, temperature=0.8, retries=1
    )
    parts = RolloutParts(renderer, write=written.append)
    rollout_manager = await create_manager(config, ScriptedClient(renderer, script), buffer, parts)
    try:
        rollout_manager.generate_sequences([RolloutRequest(Task("t", "go"), group_size=size, **options)])
        ref, _ = await buffer.sample(1, "train", 1)
        [group] = await buffer.fetch(ref, ("tokens", "rewards"))
        return group, written
    finally:
        await rollout_manager.close()


def said(request: Any) -> str:
    return "5" if request.params.temperature == 0 else "2"


@pytest.mark.parametrize("manager", MANAGERS)
async def test_the_greedy_baseline_is_an_episode_at_temperature_zero(manager: str | None) -> None:
    group, written = await roll(manager, said, greedy_baseline=True)
    assert [trajectory.reward for trajectory in group.trajectories] == [2.0, 2.0, 2.0]
    [greedy] = group.baselines
    assert (greedy.reward, greedy.baseline, greedy.group_id) == (5.0, True, group.id)
    assert not any(trajectory.baseline for trajectory in group.trajectories)
    # The same initial state for all of them, and all of them on disk.
    assert len(RESETS) == 4
    assert len(set(RESETS)) == 1
    assert sorted((trajectory.baseline, trajectory.metrics["temperature"]) for trajectory in written) == [
        (False, 0.8)
    ] * 3 + [(True, 0)]
    assert Trajectory.from_bytes(greedy.to_bytes()).baseline is True


@pytest.mark.parametrize("manager", MANAGERS)
async def test_groups_without_a_greedy_baseline_have_no_baselines(manager: str | None) -> None:
    group, written = await roll(manager, said)
    assert (len(group.trajectories), group.baselines, len(written)) == (3, [], 3)


async def test_a_failed_baseline_is_retried_and_then_missing() -> None:
    remaining = {"failures": 1}

    def script(request: Any) -> Any:
        if request.params.temperature == 0 and remaining["failures"]:
            remaining["failures"] -= 1
            return InferenceError("gone")
        return said(request)

    group, written = await roll(None, script, size=1, greedy_baseline=True)
    assert [trajectory.reward for trajectory in group.baselines] == [5.0]
    assert sum(trajectory.baseline for trajectory in written) == 2
    remaining["failures"] = 99
    group, written = await roll(None, script, size=1, greedy_baseline=True)
    # It is no member: none of them failed.
    assert (group.baselines, group.failed, len(group.trajectories)) == ([], 0, 1)
    assert [trajectory.error is not None for trajectory in written if trajectory.baseline] == [True, True]
