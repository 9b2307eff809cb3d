"""docs/agents.md, several agents: the environment plays as it stands there, the keys are those of the configuration."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import yaml

from support.chat.toy_renderer import ToyRenderer
from support.doc_pages import blocks, section
from turnwise.agents.roles import Compare
from turnwise.envs.registration import register
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trainer.config.train import TrainConfig

TEXT = section("agents.md", "Several agents")


@pytest.mark.parametrize(
    ("answer", "turns", "rewards"),
    [("yes", 4, {"seller": 7.0, "buyer": 2.0}), ("no", 4, {"seller": 0.0, "buyer": 0.0}), ("yes", 0, None)],
)
async def test_the_environment_that_is_described(answer: str, turns: int, rewards: dict | None) -> None:
    names: dict = {"__name__": "docs_several_agents"}
    [block] = blocks(TEXT, "python")
    exec(compile(block, "docs/agents.md", "exec"), names)
    register(f"test-haggle-{answer}-{turns}", names["Haggle"])
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, lambda request: "7" if request.session_id.endswith("seller") else answer)
    settings = {"env": {"name": f"test-haggle-{answer}-{turns}"}, "agent": {"name": "turns"}}
    config = RolloutConfig.model_validate({**settings, "max_tokens_per_turn": None if turns else 1})
    runner = EpisodeRunner(config, client, renderer, context_length=5000)
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
    await runner.close()
    assert outcome.error is None
    earned = {trajectory.agent: trajectory.reward for trajectory in outcome.trajectories}
    assert earned == (rewards or {"seller": 0.0, "buyer": 0.0})


def test_names_of_table_and_section_exist() -> None:
    table = TEXT.partition("| `rollout.compare` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(get_args(Compare))
    frozen, _, _ = map(yaml.safe_load, blocks(TEXT, "yaml"))
    config = RolloutConfig.model_validate({"env": {"name": "nim"}, **frozen["rollout"]})
    assert set(config.frozen) == {"past", "judge", "far", "hosted"}


def test_several_policies_as_they_are_configured() -> None:
    _, several, sharing = map(yaml.safe_load, blocks(TEXT, "yaml"))
    config, together = (
        TrainConfig.model_validate({
            "name": "r", "steps": 1, **keys, "rollout": {"env": {"name": "nim"}, **keys["rollout"]},
        })
        for keys in (several, sharing)
    )  # fmt: skip
    assert set(config.rollout.roles.values()) == set(config.policies)
    assert config.algorithms["critic_agent"].entropy_coef == 0.01
    assert config.of_policy("critic_agent").inference.replicas == 2
    assert together.served == {"solver": ("solver", "critic_agent")}
    assert config.served == {"solver": ("solver",), "critic_agent": ("critic_agent",)}
