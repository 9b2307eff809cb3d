"""The examples of several agents: an episode as their configuration plays it, and what a model is warmed up on."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.config import load_config
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import ModelInfo, ServedPolicy
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trainer.config.train import TrainConfig

EXAMPLES = Path(__file__).parents[3] / "examples"


async def played(example: str, task: Task, answers: dict[str, list[str]]) -> dict[str, float]:
    """Play one episode in which each agent says its lines; return rewards by agent."""
    config = load_config(TrainConfig, EXAMPLES / example / "train.yaml", [])
    renderer = ToyRenderer()
    lines = {agent: iter(texts) for agent, texts in answers.items()}
    client = ScriptedClient(renderer, lambda request: next(lines[request.session_id.split("/", 2)[2]]))
    # The toy renderer writes a letter a token.
    rollout = config.rollout.model_copy(update={"max_tokens_per_turn": None})
    first, *further = config.policies
    info = ModelInfo("toy", context_length=5000)
    policies = {name: ServedPolicy(client, renderer, info) for name in further}
    runner = EpisodeRunner(rollout, client, renderer, context_length=5000, policy=first, policies=policies)
    outcome = await runner.run(EpisodeSpec(task, "g"))
    await runner.close()
    assert outcome.error is None
    assert not any(trajectory.frozen for trajectory in outcome.trajectories)
    return {trajectory.agent: trajectory.reward for trajectory in outcome.trajectories}


async def test_a_game_is_won_by_who_takes_the_last_stone() -> None:
    """Of 7 stones 3 and 3 are taken by the first player; what the second one leaves is enough for that."""
    rewards = await played("two_player", Task("t", "", {"stones": 7}), {"first": ["3", "3"], "second": ["1"]})
    assert rewards == {"first": 1.0, "second": 0.0}


@pytest.mark.parametrize(
    ("proposed", "answers", "rewards"),
    [
        # Two thirds of the solvers are right: 1 - |2 * 2/3 - 1|.
        ("2 + 3", ["5", "5", "6"], [2 / 3, 1.0, 1.0, 0.0]),
        ("2 + 3", ["5", "5", "5"], [0.0, 1.0, 1.0, 1.0]),
        ("two and three", [], [0.0]),
    ],
)
async def test_a_proposer_is_paid_for_sums_that_some_solve(
    proposed: str, answers: list[str], rewards: list[float]
) -> None:
    script = {"proposer": [proposed]} | {f"solver/{number}": [answer] for number, answer in enumerate(answers)}
    rewards_by_agent = await played("proposer_solver", Task("t", ""), script)
    assert {agent: rewards_by_agent[agent] for agent in script} == pytest.approx(
        dict(zip(script, rewards, strict=True))
    )


@pytest.mark.parametrize(
    ("script", "rewards"),
    [
        ({"solver": ["-1", "{sum}"], "critic": ["wrong"]}, {"solver": 1.0, "critic": 1.0}),
        ({"solver": ["-1"], "critic": ["right"]}, {"solver": 0.0, "critic": 0.0}),
        ({"solver": ["{sum}", "-1"], "critic": ["wrong"]}, {"solver": 0.0, "critic": 0.0}),
        ({"solver": ["{sum}"], "critic": ["right"]}, {"solver": 1.0, "critic": 1.0}),
    ],
)
async def test_a_critic_is_paid_for_a_true_verdict_and_the_solver_for_its_last_answer(
    script: dict[str, list[str]], rewards: dict[str, float]
) -> None:
    total = str(sum(random.Random(0).choices(range(10), k=2)))
    spoken = {agent: [line.replace("{sum}", total) for line in lines] for agent, lines in script.items()}
    assert await played("solver_critic", Task("t", ""), spoken) == rewards


@pytest.mark.parametrize(
    ("example", "maker", "rows"),
    [("two_player", "games", 10), ("proposer_solver", "demonstrations", 20), ("solver_critic", "demonstrations", 10)],
)
async def test_a_model_is_warmed_up_on_conversations_that_end_with_an_answer(
    example: str, maker: str, rows: int
) -> None:
    spec = importlib.util.spec_from_file_location(f"{example}_main", EXAMPLES / example / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    conversation = await getattr(module, maker)(5, 0)
    assert len(conversation) == rows
    assert conversation == await getattr(module, maker)(5, 0)
    for row in conversation:
        assert [message["role"] for message in row["messages"]][-1] == "assistant"
