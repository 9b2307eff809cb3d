"""LitAgents as agents: the methods that they may have, and the older form of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import turnwise.ext.frameworks.compat.lightning as agl
from support.chat.model_dirs import renderer_for
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import LLMClient
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory

SEEN: list[Any] = []
TASK = Task("t1", "say 42", {"answer": "42"})


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


async def play(agent: Any, script: Any, *, env: str = "task", partition: str = "train", config=None, **limits: Any):
    """Return the trajectories of one group of one member."""
    renderer = renderer_for("qwen3")
    client = script if isinstance(script, LLMClient) else ScriptedClient(renderer, script)
    name = agent if isinstance(agent, str) else f"{__name__}:{agent.__qualname__}"
    rollout_config = RolloutConfig(
        env=SpecConfig(name=env), agent=NamedConfig(name=name, config=config or {}), **{"retries": 0, **limits}
    )
    written: list[Trajectory] = []
    producer = await RolloutProducer.create(rollout_config, client, None, RolloutParts(renderer, write=written.append))
    try:
        async with asyncio.timeout(60):
            await producer.gather([RolloutRequest(TASK, partition=partition)])
    finally:
        await producer.close()
    [trajectory] = written
    return trajectory


class BothWays(agl.LitAgent[dict]):
    def training_rollout(self, task: dict, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        SEEN.append(("training", task["answer"], resources["main_llm"].model, rollout.mode))
        return 1.0

    async def validation_rollout_async(self, task, resources, rollout):
        SEEN.append(("validation", task["answer"], resources["main_llm"].model, rollout.mode))
        return 0.5


class Older(agl.LitAgent[dict]):
    def __init__(self, bonus: float) -> None:
        super().__init__(trained_agents="all")
        self.bonus = bonus

    def training_rollout(self, task, rollout_id, resources):
        SEEN.append(rollout_id)
        agl.emit_message("one rollout")
        agl.emit_object({"id": rollout_id})
        agl.emit_exception(ValueError("noted only"))
        return self.bonus


class Empty(agl.LitAgent[dict]):
    pass


async def test_a_class_with_a_method_for_each_kind_of_rollout() -> None:
    assert (await play(BothWays, [])).reward == 1.0
    assert (await play(BothWays, [], partition="val")).reward == 0.5
    assert SEEN == [("training", "42", "turnwise", "train"), ("validation", "42", "turnwise", "val")]


async def test_the_older_form_and_a_configuration() -> None:
    trajectory = await play(Older, [], partition="val", config={"bonus": 0.25})
    assert trajectory.reward == 0.25
    assert [trajectory.id.rpartition(".")[0]] == SEEN


async def test_a_class_without_methods_says_so() -> None:
    trajectory = await play(Empty, [])
    assert "Empty defines no rollout, training_rollout or validation_rollout" in trajectory.error
