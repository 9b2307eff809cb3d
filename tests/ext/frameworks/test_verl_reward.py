"""Reward functions and tools that were written for verl pay here what they pay there."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.chat.model_dirs import renderer_for
from support.doc_pages import blocks, section
from turnwise.config import load_config
from turnwise.envs.rewards import Rubric
from turnwise.envs.rewards.groups import conversation_of
from turnwise.envs.rewards.registry import load_function
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.errors import EnvError
from turnwise.ext.frameworks.compat.verl_agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    initialize_tools_from_config,
    register,
)
from turnwise.ext.frameworks.compat.verl_reward import VerlScore
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import SourceConfig, Task, load_tasks

# Twenty episodes with what verl's own code made of them: see its "provenance".
RECORDED = json.loads(Path(__file__).with_name("verl_episodes.json").read_text())
EPISODES = RECORDED["episodes"]

# A tool as verl's are written, in a module beside the file that lists it: each call is answered as it was there.
TOOL = """
    from turnwise import BaseTool, ToolResponse
    from helper_of_tools import WORTH

    class Recorded(BaseTool):
        def __init__(self, config, tool_schema):
            super().__init__(config, tool_schema)
            self.left = {}

        async def create(self, instance_id=None, answers=(), **kwargs):
            instance_id, response = await super().create(instance_id)
            self.left[instance_id] = list(answers)
            return instance_id, response

        async def execute(self, instance_id, parameters, **kwargs):
            text, reward = self.left[instance_id].pop(0)
            return ToolResponse(text=text), reward, {}

        async def calc_reward(self, instance_id, **kwargs):
            return WORTH

        async def release(self, instance_id, **kwargs):
            del self.left[instance_id]
"""


def recorded_score(data_source, solution_str, ground_truth, extra_info):
    """What verl's function returned, given exactly what it was given there."""
    episode = EPISODES[extra_info["index"]]
    assert solution_str == episode["solution_str"]
    assert (data_source, ground_truth) == (episode["function"], episode["ground_truth"])
    assert extra_info["num_turns"] == episode["num_turns"]
    assert extra_info["rollout_reward_scores"] == {}
    rewards = [reward for _, reward in episode["results"] if reward is not None]
    assert extra_info["tool_rewards"][: len(rewards)] == rewards
    return episode["result"]


def row_of(index: int) -> dict[str, Any]:
    episode = EPISODES[index]
    answers = [*episode["results"], ["one more", None]]
    return {
        "data_source": episode["function"],
        "prompt": [{"role": "user", "content": episode["question"]}],
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": episode["ground_truth"]},
        "extra_info": {"index": index, "tools_kwargs": {episode["tool"]: {"create_kwargs": {"answers": answers}}}},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    (folder / "recorded_tools.py").write_text(textwrap.dedent(TOOL))
    (folder / "helper_of_tools.py").write_text("WORTH = 1.0\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row_of(index)) + "\n" for index in range(len(EPISODES))))
    for schema in RECORDED["tools"]:
        entry = {"class_name": "recorded_tools.Recorded", "config": {"type": "native"}, "tool_schema": schema}
        (folder / f"{schema['function']['name']}.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return folder


async def play(config: dict[str, Any], task: Task, script: list[str]):
    renderer = renderer_for("qwen2_5")
    rollout = load_config(RolloutConfig, defaults=config)
    # Exactly the recorded text, as it was sampled there.
    ids = [renderer.text.encode(f"{turn}<|im_end|>").tolist() for turn in script]
    runner = EpisodeRunner(rollout, ScriptedClient(renderer, ids), renderer, context_length=9000)
    try:
        await runner.prepare()
        [trajectory] = (await runner.run(EpisodeSpec(task, "g"))).trajectories
    finally:
        await runner.close()
    assert trajectory.error is None
    return trajectory


def tool_config(folder: Path, index: int, **config: Any) -> dict[str, Any]:
    verl = {"function": "verl", "arguments": {"compute_score": f"{__file__}:recorded_score"}}
    return {
        "env": {
            "name": "tool",
            "config": {"scorer": {"score": verl}, **config},
            "tools": {"tool_config_path": str(folder / f"{EPISODES[index]['tool']}.yaml")},
        },
        "max_turns": len(EPISODES[index]["turns"]),
    }


async def test_twenty_recorded_episodes_pay_what_verl_paid(folder: Path) -> None:
    tasks = load_tasks(SourceConfig(source=str(folder / "rows.jsonl"), format="verl"))
    for index, (episode, task) in enumerate(zip(EPISODES, tasks, strict=True)):
        trajectory = await play(tool_config(folder, index), task, episode["turns"])
        result = episode["result"]
        score = result["score"] if isinstance(result, dict) else result
        assert trajectory.reward == pytest.approx(score), index


async def test_one_key_adds_the_rewards_of_tools(folder: Path) -> None:
    tasks = load_tasks(SourceConfig(source=str(folder / "rows.jsonl"), format="verl"))
    trajectory = await play(tool_config(folder, 2, tool_rewards=True), tasks[2], EPISODES[2]["turns"])
    assert [(name, value) for _, name, value in trajectory.rewards] == [
        ("tool/calc_gsm8k_reward", -0.05), ("tool/calc_gsm8k_reward", 0.0), ("score", 1.1),
        ("tool/calc_gsm8k_reward", 1.0),
    ]  # fmt: skip


def test_tools_of_a_file_are_instantiated_as_loops_do(folder: Path) -> None:
    [tool] = initialize_tools_from_config(folder / "code_interpreter.yaml")
    assert tool.name == "code_interpreter"
    assert tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) == RECORDED["tools"][1]


@register("counting_loop")
class CountingLoop(AgentLoopBase):
    """Reports a part of what it sampled, with its own count of turns and a field of its own."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(prompt_ids=prompt, sampling_params=sampling_params)
        ids = output.token_ids[:-1]
        return AgentLoopOutput(prompt, ids, [1] * len(ids), num_turns=7, extra_fields={"found": "yes"})


def loop_score(data_source, solution_str, ground_truth, extra_info):
    assert extra_info["found"] == "yes"
    assert extra_info["raw_prompt"] == [{"role": "user", "content": "6 times 7?"}]
    return extra_info["num_turns"] + float(solution_str == ground_truth)


async def test_output_of_a_custom_loop_is_what_is_scored() -> None:
    verl = {"function": "verl", "arguments": {"compute_score": f"{__file__}:loop_score"}}
    config = {"env": {"name": "single_turn", "config": {"scorer": {"score": verl}}}, "agent": {"name": "counting_loop"}}
    trajectory = await play(config, Task("t", "6 times 7?", data={"ground_truth": "It is 42."}), ["It is 42."])
    assert trajectory.reward == 8.0


# Without token ids


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {
        "score": float(solution_str == ground_truth),
        "acc": True,
        "pred": solution_str,
        "index": extra_info["index"],
    }


async def async_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    return float(solution_str == ground_truth) + bonus


def written_score(data_source, solution_str, ground_truth, extra_info):
    assert solution_str == EPISODES[0]["solution_str"]
    return float(extra_info["num_turns"])


async def test_a_recording_of_text_is_written_in_hermes_form(folder: Path) -> None:
    # As of a hosted endpoint.
    tasks = load_tasks(SourceConfig(source=str(folder / "rows.jsonl"), format="verl"))
    trajectory = await play(tool_config(folder, 0), tasks[0], EPISODES[0]["turns"])
    # The calls of recorded messages are what they were in the episode.
    called = {"function": lambda messages: len(messages[1]["tool_calls"][0].name), "weight": 0.5}
    env = SingleTurnEnv(lambda: 0.0)
    env.conversation = conversation_of(trajectory)
    rubric = Rubric({"again": VerlScore(written_score), "called": called})
    score = await rubric.score(env, tasks[0], env.conversation[-1])
    assert sum(score.values()) == 4.0 + len(EPISODES[0]["tool"]) / 2


async def test_results_and_missing_columns() -> None:
    row = {"data_source": "x", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}}
    env = SingleTurnEnv(lambda: 0.0)
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    assert VerlScore(compute_score)(env, Task("t", "?", data=row), messages) == (1.0, {"acc": 1.0, "index": 7.0})
    bonus = load_function("verl", {"compute_score": f"{__file__}:async_score", "bonus": 2}, "here")
    assert await bonus(env, Task("t", "?", data={"ground_truth": "5"}), messages) == 2.0
    with pytest.raises(EnvError, match="neither 'ground_truth'"):
        VerlScore(compute_score)(env, Task("t", "?", data={"answer": "4"}), messages)
    with pytest.raises(EnvError, match="has no 'score'"):
        VerlScore(lambda **_: {"value": 1})(env, Task("t", "?", data=row), messages)


def test_configuration_of_the_page_is_one(folder: Path) -> None:
    [config] = [yaml.safe_load(text) for text in blocks(section("coming-from-other-frameworks.md", "verl"), "yaml")]
    [part] = RolloutConfig.model_validate(config["rollout"]).env.config["scorer"].values()
    (folder / "my_reward.py").write_text(
        "def compute_score(solution_str, shaping_reward, **columns):\n    return 1.0\n"
    )
    path = f"{folder}/{part['arguments'].pop('compute_score')}"
    assert isinstance(load_function("verl", {"compute_score": path, **part["arguments"]}, "here"), VerlScore)
