"""A search tool as verl's documentation shows one: a class with create, execute and release, and its YAML.

Written to verl's signatures. What changes for Turnwise are the two lines of imports, and in the configuration the names
``rollout.env.tools.tool_config_path`` (verl: ``actor_rollout_ref.rollout.multi_turn.tool_config_path``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

# verl: from verl.tools.base_tool import BaseTool
# verl: from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from turnwise.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse


class MySearchTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}
        self.topk = config.get("topk", 3)
        self.documents = config["documents"]

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instance_dict[instance_id] = {"found": [], "ground_truth": ground_truth}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        queries = parameters.get("query_list")
        agent_data = kwargs["agent_data"]
        agent_data.extra_fields["queries"] = agent_data.extra_fields.get("queries", 0) + len(queries)
        hits = [
            document
            for query in queries
            for document in self.documents
            if all(word.lower() in document.lower() for word in query.split())
        ][: self.topk]
        state = self._instance_dict[instance_id]
        state["found"] += hits
        right = sum(state["ground_truth"] in document for document in hits)
        metrics = {"found": len(hits), "queries_so_far": agent_data.extra_fields["queries"]}
        return ToolResponse(text="\n".join(hits) or "No results."), 0.1 * right, metrics

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(len(set(self._instance_dict[instance_id]["found"])) > 1)

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]


# What follows runs it: through the runner, with a model that follows a script.

from support.chat.toy_renderer import ToyRenderer  # noqa: E402
from turnwise.config import load_config  # noqa: E402
from turnwise.inference.scripted import ScriptedClient  # noqa: E402
from turnwise.rollout import RolloutConfig, RolloutProducer, RolloutRequest  # noqa: E402
from turnwise.rollout.core import RolloutParts  # noqa: E402
from turnwise.tasks import Task  # noqa: E402
from turnwise.types import ToolCall  # noqa: E402

FILE = Path(__file__).with_name("search_tool.yaml")
# A row of verl's parquet files: the prompt, and what the tools get, where verl has it.
ROW = {
    "id": "row-0",
    "data_source": "capitals",
    "prompt": [{"role": "user", "content": "What is the capital of France?"}],
    "reward_model": {"style": "rule", "ground_truth": "Paris"},
    "extra_info": {"index": 0, "tools_kwargs": {"search": {"create_kwargs": {"ground_truth": "Paris"}}}},
}


def score(text: str, task: Task) -> float:
    """Whether the answer names the ground truth."""
    return float(task.data["reward_model"]["ground_truth"] in text)


def search(*queries: str):
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "search", {"query_list": list(queries)})]}


@pytest.fixture
def config(monkeypatch) -> RolloutConfig:
    monkeypatch.syspath_prepend(FILE.parent)
    env = {
        "name": "tool",
        "config": {"scorer": "test_compat_search_tool:score"},
        "tools": {"tool_config_path": str(FILE)},
    }
    return load_config(RolloutConfig, defaults={"env": env})


async def run(config: RolloutConfig, script, *tasks: Task):
    renderer = ToyRenderer()
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, script), None, RolloutParts(renderer))
    groups = await producer.gather([RolloutRequest(task, group_size=2) for task in tasks])
    await producer.close()
    return [trajectory for group in groups for trajectory in group.trajectories]


async def test_tokens_and_rewards_of_an_episode(config: RolloutConfig) -> None:
    script = [search("capital france"), search("rome", "paris"), "It is Paris."]
    trajectories = await run(config, script, Task.from_record(ROW))
    renderer = ToyRenderer()
    for trajectory in trajectories:
        assert trajectory.error is None
        # The reward of each call stands on the turn that made it; what the state is worth goes with the score.
        assert trajectory.rewards == [
            ("t0", "tool/search", 0.1), ("t1", "tool/search", 0.1), ("t2", "score", 1.0), ("t2", "tool/search", 1.0)
        ]  # fmt: skip
        assert [trajectory.turn_metrics[turn]["search/queries_so_far"] for turn in ("t0", "t1")] == [1.0, 3.0]
        kinds = [segment.kind for segment in trajectory.segments]
        assert kinds == ["context", "sampled"] * 3
        context_texts = [
            renderer.decode(segment.token_ids) for segment in trajectory.segments if segment.kind == "context"
        ]
        assert "Paris is the capital of France." in context_texts[1]
        assert "Rome is the capital of Italy.\nParis is the capital of France." in context_texts[2]
        sampled_texts = [renderer.decode(segment.token_ids) for segment in trajectory.segments if segment.sampled]
        assert "It is Paris." in sampled_texts[2]
        # The whole schema reaches the renderer, with what verl's classes would drop.
        [tool] = trajectory.segments[0].tools
        assert tool["function"]["parameters"]["properties"]["query_list"]["items"] == {"type": "string"}
        assert tool["function"]["parameters"]["properties"]["query_list"]["minItems"] == 1


async def test_members_have_state_of_their_own_and_are_released(config: RolloutConfig) -> None:
    from test_compat_search_tool import MySearchTool as Loaded

    released: list[str] = []
    original = Loaded.release

    async def release(self, instance_id: str, **kwargs) -> None:
        released.append(instance_id)
        await original(self, instance_id, **kwargs)

    Loaded.release = release
    try:
        trajectories = await run(config, [search("rome"), "no idea"], Task.from_record(ROW))
    finally:
        Loaded.release = original
    assert [trajectory.reward for trajectory in trajectories] == [0.0, 0.0]
    assert len(released) == len(set(released)) == 2
