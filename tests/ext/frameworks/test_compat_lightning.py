"""Agents written as Agent-Lightning documents them run here; only the imports are others."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest
from openai import AsyncOpenAI, OpenAI

# In Agent-Lightning: import agentlightning as agl; from agentlightning import LLM, Rollout, emit_reward, rollout.
import turnwise.ext.frameworks.compat.lightning as agl
from support.chat.model_dirs import renderer_for
from turnwise.ext.frameworks.compat.lightning import LLM, Rollout, emit_reward, rollout
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trajectory import to_samples


class Question(TypedDict):
    question: str
    answer: str


@rollout
def sync_agent(task: Question, llm: LLM, rollout: Rollout) -> float:
    assert rollout.rollout_id
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "dummy-key")
    response = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task["question"]}])
    return 1.0 if response.choices[0].message.content == task["answer"] else 0.0


@agl.rollout
async def two_turns(task: Question, llm: agl.LLM) -> None:
    client = AsyncOpenAI(base_url=llm.endpoint, api_key="dummy")
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    first = await client.chat.completions.create(model=llm.model, messages=messages, **llm.sampling_parameters)
    agl.emit_message("asked once")
    emit_reward(0.25)
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
    await client.chat.completions.create(model=llm.model, messages=messages)
    agl.emit_reward({"right": 0.5, "length": 12.0}, primary_key="right")


class ClassAgent(agl.LitAgent[Question]):
    async def rollout_async(self, task: Question, resources: agl.NamedResources, rollout: agl.Rollout) -> float | None:
        llm = resources["main_llm"]
        base_url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        client = AsyncOpenAI(base_url=base_url, api_key="dummy")
        response = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}]
        )
        return float(response.choices[0].message.content == task["answer"])


class OlderAgent(agl.LitAgent):
    def training_rollout(self, task, rollout_id, resources):
        client = OpenAI(base_url=resources["main_llm"].endpoint, api_key="dummy")
        response = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
        return float(response.choices[0].message.content == task["answer"])


@pytest.mark.parametrize(
    ("agent", "rewards", "turns"),
    [
        ("sync_agent", [(None, "reward", 1.0)], 1),
        ("two_turns", [("t0", "reward", 0.25), ("t1", "right", 0.5)], 2),
        ("ClassAgent", [(None, "reward", 1.0)], 1),
        ("OlderAgent", [(None, "reward", 1.0)], 1),
    ],
)
async def test_a_documented_agent_runs_against_its_endpoint(agent, rewards, turns) -> None:
    renderer = renderer_for("qwen3")
    config = RolloutConfig(env=SpecConfig(name="task"), agent=NamedConfig(name=f"{__name__}:{agent}"))
    runner = EpisodeRunner(config, ScriptedClient(renderer, ["42", "yes"]), renderer, context_length=5000)
    try:
        task = Task("t", "6 times 7?", {"question": "6 times 7?", "answer": "42"})
        outcome = await runner.run(EpisodeSpec(task, "g"))
    finally:
        await runner.close()
    [trajectory] = outcome.trajectories
    assert (trajectory.error, trajectory.rewards) == (None, rewards)
    assert sum(segment.sampled for segment in trajectory.segments) == turns
    [row] = to_samples(trajectory).rows
    assert row.trained_tokens == trajectory.sampled_tokens > 0
    assert trajectory.forks() == {}


def test_a_decorated_function_is_still_itself() -> None:
    assert sync_agent.__name__ == "sync_agent"
    with pytest.raises(AttributeError):
        sync_agent({"question": "q", "answer": "a"}, llm=None, rollout=None)
