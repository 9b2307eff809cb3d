"""Agent loops written as verl documents them run here; only the imports are others."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

from support.chat.model_dirs import renderer_for

# In verl: verl.experimental.agent_loop.agent_loop, verl.utils.profiler and verl.utils.rollout_trace.
from turnwise.ext.frameworks.compat.verl_agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    register,
    rollout_trace_op,
    simple_timer,
)
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import SourceConfig, Task, load_tasks
from turnwise.trajectory import to_samples


@register("my_agent")
class MyAgentLoop(AgentLoopBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_length = self.config.actor_rollout_ref.rollout.prompt_length
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        multi_modal_data = await self.process_vision_info(messages)
        images, videos = multi_modal_data.get("images"), multi_modal_data.get("videos")
        prompt_ids = await self.apply_chat_template(messages, images=images, videos=videos)
        metrics: dict[str, Any] = {}
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
                image_data=images,
                video_data=videos,
            )
        if metrics.get("num_preempted") is None:
            metrics["num_preempted"] = output.num_preempted if output.num_preempted is not None else -1
        response_mask = [1] * len(output.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[: self.response_length],
            response_mask=response_mask[: self.response_length],
            response_logprobs=output.log_probs[: self.response_length] if output.log_probs else None,
            routed_experts=output.routed_experts,
            multi_modal_data=multi_modal_data,
            num_turns=2,
            metrics=metrics,
            extra_fields=output.extra_fields,
        )


class OlderAgentLoop(AgentLoopBase):
    """The first documented form: generate() returns the ids, and the loop runs the tokenizer in an executor."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        )
        response_ids: list[int] = []
        response_mask: list[int] = []
        for _ in range(2):
            request_id = uuid4().hex
            sampled = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids + response_ids, sampling_params=sampling_params
            )
            response_ids += sampled
            response_mask += [1] * len(sampled)
            tool_ids = self.tokenizer.encode("\n42", add_special_tokens=False)
            response_ids += tool_ids
            response_mask += [0] * len(tool_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=response_ids, response_mask=response_mask, num_turns=4, metrics={},
            reward_score=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(("loop", "turns"), [(MyAgentLoop, 1), (OlderAgentLoop, 2)])
async def test_a_documented_loop_runs_with_only_its_imports_changed(tmp_path, loop, turns) -> None:
    # The registry's file, as verl's agent_loop_config_path names it, and a row as its datasets have them.
    names = tmp_path / "agents.yaml"
    names.write_text(f"- name: math_agent\n  _target_: {__name__}.{loop.__name__}\n")
    row = {
        "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "6 times 7?"}],
        "agent_name": "math_agent", "ability": "math", "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"split": "train", "index": 0},
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [task] = load_tasks(SourceConfig(source=str(tmp_path / "rows.jsonl"), format="verl"))
    trajectory = await play(task, agent_loop_config_path=names)
    assert trajectory.error is None
    assert trajectory.metrics["num_turns"] == 2 * turns
    sampled = [segment for segment in trajectory.segments if segment.sampled]
    assert len(sampled) == turns
    [row] = to_samples(trajectory).rows
    assert row.input_ids[row.loss_mask].tolist() == [number for turn in sampled for number in turn.token_ids.tolist()]


async def play(task: Task, **rollout: Any):
    renderer = renderer_for("qwen2_5")
    scorer = "turnwise.envs.basic.task_env:only_tools"
    config = RolloutConfig(
        env=SpecConfig(name="single_turn", config={"scorer": scorer}), agent=NamedConfig(name="react"), **rollout
    )
    runner = EpisodeRunner(config, ScriptedClient(renderer, ["42", "42"]), renderer, context_length=5000)
    try:
        outcome = await runner.run(EpisodeSpec(task, "g"))
    finally:
        await runner.close()
    return outcome.trajectories[0]
