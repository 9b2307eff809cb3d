"""Functions as agents: what they are given, what they may return, and how their episodes end."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from support.chat.model_dirs import renderer_for
from turnwise.agents import LLM, Episode, Rollout, emit_reward, make_agent, register_agent, rollout
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import AgentError, InferenceError, RegistryError
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import LLMClient
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory
from turnwise.types import StopReason

SEEN: list[Any] = []
HOLD = threading.Event()
TASK = Task("t1", "say 42", {"answer": "42"})


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()
    HOLD.clear()


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


# What a function is given


@rollout
async def native(episode: Episode, *, prefix: str = "got ") -> float:
    message = await episode.session.chat(episode.observation)
    SEEN.append(prefix + message["content"])
    return 0.75


@rollout
def proxied(task: dict, llm: LLM, rollout: Rollout) -> float:
    SEEN.append((threading.current_thread() is threading.main_thread(), task, llm, rollout))
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = client.chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": task["prompt"]}], **llm.sampling_parameters
    )
    return float(answer.choices[0].message.content == task["answer"])


@rollout
async def another_name(task: Any, model: LLM) -> None:
    client = AsyncOpenAI(base_url=model.endpoint, api_key=model.api_key)
    await client.chat.completions.create(model=model.model, messages=[{"role": "user", "content": task["prompt"]}])
    emit_reward(0.5)


async def test_a_function_of_an_episode() -> None:
    trajectory = await play(native, ["42"], config={"prefix": "said "})
    assert SEEN == ["said 42"]
    assert trajectory.rewards == [(None, "reward", 0.75)]
    assert trajectory.stop_reason is StopReason.COMPLETED
    # It is still the function that it was.
    assert native.__name__ == "native"


async def test_a_function_of_a_task_and_a_model() -> None:
    trajectory = await play(proxied, ["42"], partition="val", temperature=0.7, max_tokens_per_turn=9)
    [(on_loop, task, llm, attempt)] = SEEN
    assert not on_loop
    assert task == {"id": "t1", "prompt": "say 42", "answer": "42"}
    assert llm.sampling_parameters == {"temperature": 0.7, "top_p": 1.0, "max_tokens": 9}
    assert llm.endpoint == f"{llm.anthropic_endpoint}/v1"
    assert (attempt.mode, attempt.input, attempt.attempt.sequence_id) == ("val", task, 1)
    assert trajectory.id == attempt.attempt.attempt_id == f"{attempt.rollout_id}.0"
    assert trajectory.rewards == [(None, "reward", 1.0)]
    assert [segment.kind for segment in trajectory.segments] == ["context", "sampled"]


async def test_a_model_by_its_type_and_a_reward_that_is_emitted() -> None:
    trajectory = await play(another_name, ["41"])
    assert trajectory.rewards == [("t0", "reward", 0.5)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rollout(lambda task: 1.0), "takes 'episode', or 'task' and 'llm'"),
        (lambda: rollout(lambda episode: 1.0), "write 'async def'"),
        (lambda: native.make_agent(suffix="x"), "does not take its configuration {'suffix': 'x'}"),
        (lambda: native.make_agent(episode=1), "config sets episode"),
        (lambda: make_agent("json:dumps"), "put @rollout of turnwise.agents above it"),
        (lambda: make_agent("json:JSONDecoder"), "must be a subclass of turnwise.Agent"),
    ],
)
def test_invalid_agent_functions_raise_errors_with_the_reason(make, message) -> None:
    with pytest.raises(AgentError) as raised:
        make()
    assert message in str(raised.value)


def test_functions_are_registered_and_found_by_name() -> None:
    @rollout("test-functions-named")
    async def first(episode: Episode) -> None:
        pass

    assert type(make_agent("test-functions-named")).__name__ == "FunctionAgent"
    with pytest.raises(RegistryError, match="is taken by"):
        register_agent("test-functions-named")(native)
    with pytest.raises(RegistryError, match="are reserved for references"):
        rollout("a.b")(lambda task, llm: None)
    with pytest.raises(RegistryError, match=r"did you mean 'react'\?.*named by a reference"):
        make_agent("reactt")


# What it may return


@rollout
async def returns(episode: Episode, *, what: str, turns: int = 2) -> Any:
    for _ in range(turns):
        await episode.session.chat(
            [*episode.observation, {"role": "user", "content": "again"}] * (episode.session.turns + 1)
        )
    return {
        "none": None, "int": 2, "bool": True, "numpy": np.float32(0.5), "tensor": torch.tensor(0.25),
        "named": {"right": 1.0, "short": 0.5}, "turns": [0.5, None], "short": [1.0], "text": "1.0", "nan": float("nan"),
        "vector": np.zeros(2),
    }[what]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "rewards"),
    [
        ("none", []),
        ("int", [(None, "reward", 2.0)]),
        ("bool", [(None, "reward", 1.0)]),
        ("numpy", [(None, "reward", 0.5)]),
        ("tensor", [(None, "reward", 0.25)]),
        ("named", [(None, "right", 1.0), (None, "short", 0.5)]),
        ("turns", [("t0", "reward", 0.5)]),
    ],
)
async def test_rewards_that_are_returned(what, rewards) -> None:
    trajectory = await play(returns, ["a", "b"], config={"what": what})
    assert trajectory.error is None
    assert trajectory.rewards == rewards


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("short", "returned 1 rewards ([1.0]), but took 2 turns"),
        ("text", "'1.0' of type str is not a reward"),
        ("nan", "is nan: it must be a finite number"),
        ("vector", "of type ndarray is not a reward"),
    ],
)
async def test_invalid_return_values_raise_agent_errors(what, message) -> None:
    trajectory = await play(returns, ["a", "b"], config={"what": what})
    assert message in trajectory.error
    assert trajectory.stop_reason is StopReason.ERROR


async def test_an_agent_that_never_asks_the_model_keeps_its_reward() -> None:
    trajectory = await play(returns, [], config={"what": "int", "turns": 0})
    assert trajectory.segments == []
    assert trajectory.reward == 2.0
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.COMPLETED)


class Scored(ToolEnv):
    """Scores what it is given, and notes that it did."""

    def reset(self, task=None, *, seed=None):
        return "go", {}

    def score(self, final):
        SEEN.append("scored")
        return 0.125


@rollout
async def steps_and_returns(episode: Episode, *, reward: float | None = None) -> float | None:
    await episode.step(await episode.session.chat(episode.observation))
    return reward


@rollout
async def emits(episode: Episode) -> None:
    emit_reward(1.0)
    emit_reward(0.25)
    await asyncio.to_thread(emit_reward, 0.5)


async def test_the_environment_is_asked_only_where_the_agent_gave_nothing() -> None:
    env = f"{__name__}:Scored"
    assert (await play(native, ["x"], env=env)).rewards == [(None, "reward", 0.75)]
    assert SEEN == ["got x"]
    scored = await play(returns, ["x", "y"], env=env, config={"what": "none"})
    assert scored.rewards == [(None, "score", 0.125)]
    assert SEEN == ["got x", "scored"]


async def test_two_judges_are_an_error() -> None:
    env = f"{__name__}:Scored"
    assert (await play(steps_and_returns, ["x"], env=env)).rewards == [("t0", "score", 0.125)]
    outcome = await play(steps_and_returns, ["x"], env=env, config={"reward": 1.0})
    assert "the environment has scored this episode already" in outcome.error


async def test_emitted_rewards_add_up() -> None:
    trajectory = await play(emits, [])
    assert trajectory.reward == 1.75
    with pytest.raises(AgentError, match="no episode runs here"):
        emit_reward(1.0)


# How episodes end


@rollout
def swallows(task: dict, llm: LLM) -> float:
    """Takes every failure of the model for an answer that is worth nothing."""
    client = OpenAI(base_url=llm.endpoint, api_key="x", max_retries=0)
    try:
        for _ in range(3):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    except Exception:
        return 0.0
    return 1.0


@rollout
def holds(task: dict, llm: LLM) -> float:
    HOLD.wait(30)
    return 1.0


async def test_a_budget_that_is_spent_is_the_end_and_the_reward_stays() -> None:
    trajectory = await play(swallows, ["a"] * 3, max_turns=2)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert (trajectory.error, trajectory.rewards) == (None, [(None, "reward", 0.0)])


async def test_a_failure_is_never_a_reward_of_zero() -> None:
    def broken(request: Any) -> str:
        raise InferenceError("the server is gone")

    trajectory = await play(swallows, broken)
    assert trajectory.stop_reason is StopReason.ERROR
    assert "the server is gone" in trajectory.error


@pytest.mark.long
async def test_a_thread_that_does_not_come_back_is_given_up() -> None:
    started = time.monotonic()
    trajectory = await play(holds, [], episode_timeout=1.5)
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert trajectory.error.startswith("ToolThreadLost")
    assert trajectory.rewards == []
    assert time.monotonic() - started < 20
    HOLD.set()
