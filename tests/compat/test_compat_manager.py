"""A rollout manager written to the signatures that verl documents for ``agent_loop_manager_class``.

What differs from there: the base class, the arguments of ``create``, the name of the configuration's key, and that a
session records the ids (nothing else may). ``generate_sequences`` does not block.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.trainer.lookup_run import MODEL, build_model, lines, shared, silent, train_config
from turnwise.config import load_config
from turnwise.evaluation import EvalPlan, evaluate
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.rollout import RolloutConfig, RolloutManager, RolloutParts
from turnwise.rollout.managers import create_manager
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import SamplingParams


class MyAgentLoopManager(RolloutManager):
    def __init__(self, config, llm_client, queue, parts):
        self.config, self.llm_client, self.queue, self.parts = config, llm_client, queue, parts
        self.working = set()

    @classmethod
    async def create(cls, config, client, buffer, parts):
        return cls(config, client, buffer, parts)

    async def close(self):
        for work in self.working:
            work.cancel()

    def generate_sequences(self, prompts) -> None:
        for prompt in prompts:
            work = asyncio.create_task(self.prompt(prompt))
            self.working.add(work)
            work.add_done_callback(self.working.discard)

    async def prompt(self, prompt):
        uid = f"{self.parts.run_part}-{prompt.partition}-{prompt.task.id}-{prompt.epoch}-{prompt.tag}"
        runs = [self.loop(prompt, uid, number) for number in range(prompt.group_size)]
        members = await asyncio.gather(*runs)
        await self.queue.put(TrajectoryGroup(uid, prompt.task.id, members, prompt.partition))

    async def loop(self, prompt, uid, number):
        """A loop of one's own: ask, and be paid for an answer that is short."""
        temperature = self.config.temperature if prompt.temperature is None else prompt.temperature
        session = Session(
            self.llm_client,
            self.parts.renderer,
            id=f"{uid}/{number}.0",
            params=SamplingParams(temperature=temperature, max_tokens=self.config.max_tokens_per_turn),
            limits=SessionLimits(context_length=(await self.llm_client.model_info()).context_length),
            seed=number,
        )
        answer = await session.chat(prompt.task.messages())
        return Trajectory(
            id=session.id,
            episode_id=session.id,
            group_id=uid,
            task_id=prompt.task.id,
            partition=prompt.partition,
            segments=session.segments(),
            rewards=[(answer["turn_id"], "short", (12 + 3 * number) / (12 + len(answer["content"])))],
            metrics={"temperature": temperature},
        )


NAME = f"{__name__}.MyAgentLoopManager"


async def test_manager_is_called_as_verl_documents() -> None:
    renderer = ToyRenderer()
    config = load_config(
        RolloutConfig, defaults={"env": {"name": "lookup"}, "max_tokens_per_turn": 40, "agent_loop_manager_class": NAME}
    )
    client = ScriptedClient(renderer, lambda request: "" if request.params.temperature == 0 else "x" * 2)
    manager = await create_manager(config, client, None, RolloutParts(renderer))
    plan = EvalPlan(tasks="turnwise.envs.basic.lookup:tasks?n=3&split=test", samples=2, pass_k=[1, 2])
    result = await evaluate(manager, plan)
    await manager.close()
    assert result.sampled is not None
    assert result.greedy is not None
    assert (result.sampled.success.mean, result.greedy.success.mean) == (0.5, 1.0)


@pytest.fixture(scope="module")
def lookup_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "lookup-model", build_model) / MODEL


def test_custom_manager_trains(lookup_model: Path, tmp_path: Path) -> None:
    changes = {"rollout": {"agent_loop_manager_class": NAME}, "custom": {"mine": [1, {"two": 2}]}, "steps": 2}
    held_out = {"tasks": "turnwise.envs.basic.lookup:tasks?n=2&split=test", "samples": 1, "every": None}
    summary = run_train(train_config(lookup_model, tmp_path, eval=held_out, **changes), console=silent())
    assert summary.after is not None
    assert summary.after["sampled"]["success"]["episodes"] == 2
    steps = [record for record in lines(summary.directory / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["batch/failed"] for record in steps] == [0, 0]
    assert all(record["gap/max"] < 1e-4 for record in steps), [record["gap/max"] for record in steps]
    report = audit_run(summary.directory, console=silent())
    assert report.contradictions == []
