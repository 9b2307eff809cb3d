"""Agent loops: what they are given, what they may return, and what is trained of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chat.model_dirs import renderer_for
from turnwise.agents import make_agent
from turnwise.envs.basic.lookup import table
from turnwise.errors import AgentError, BudgetExceeded, RegistryError, ToolSchemaError
from turnwise.ext.frameworks.compat.verl_agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    TokenOutput,
    register,
    rollout_trace_op,
    simple_timer,
)
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import StopReason, ToolCall

SEEN: list[Any] = []
SEED = 7
TABLE = table(SEED)
TASK = Task("t1", "say 42", {"answer": "42", "extra_info": {"index": 3}})


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


async def play(loop: Any, script: Any, *, env: str = "task", config=None, family: str = "qwen3", **limits: Any):
    renderer = renderer_for(family)
    client = ScriptedClient(renderer, script)
    name = loop if isinstance(loop, str) else f"{__name__}:{loop.__qualname__}"
    agent = NamedConfig(name=name, config=config or {})
    runner = EpisodeRunner(
        RolloutConfig(env=SpecConfig(name=env), agent=agent, **limits), client, renderer, context_length=5000
    )
    try:
        async with asyncio.timeout(60):
            outcome = await runner.run(EpisodeSpec(TASK, "g", env_seed=SEED))
    finally:
        await runner.close()
    [trajectory] = outcome.trajectories
    return Trajectory.from_bytes(trajectory.to_bytes())


def trained(trajectory: Trajectory) -> list[list[int]]:
    return [row.input_ids[row.loss_mask].tolist() for row in to_samples(trajectory).rows]


@register("test-loop-single")
class Single(AgentLoopBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        SEEN.append((sampling_params, kwargs, self.rollout_config))
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        metrics: dict[str, float] = {}
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate("r", prompt_ids=prompt_ids, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[: self.response_length],
            response_mask=[1] * len(output.token_ids[: self.response_length]),
            response_logprobs=output.log_probs[: self.response_length],
            num_turns=2,
            metrics=metrics,
            extra_fields=output.extra_fields | {"reward_extra_info": {"acc": True, "note": "x"}},
            reward_score=float(self.tokenizer.decode(output, skip_special_tokens=True).endswith(kwargs["answer"])),
        )


async def test_single_turn_loop_records_a_turn() -> None:
    trajectory = await play("test-loop-single", ["42"], temperature=0.8, max_turns=3)
    [(params, row, config)] = SEEN
    assert params == {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert row["raw_prompt"] == [{"role": "user", "content": "say 42"}]
    assert (row["answer"], row["extra_info"], row["tools_kwargs"]) == ("42", {"index": 3}, {})
    assert (config.max_model_len, config.multi_turn.max_assistant_turns, config.temperature) == (5000, 3, 0.8)
    assert (trajectory.error, trajectory.rewards) == (None, [(None, "reward", 1.0)])
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.metrics["num_turns"] == 2
    assert trajectory.metrics["loop/acc"] == 1.0
    assert trajectory.metrics["loop/generate_sequences_seconds"] > 0
    # The prompt is the one that a session of messages would have sent.
    chatted = await play("react", ["42"], temperature=0.8)
    assert trajectory.segments[0].token_ids.tolist() == chatted.segments[0].token_ids.tolist()
    assert trajectory.segments[1].token_ids.tolist() == chatted.segments[1].token_ids.tolist()


async def test_lengths_bound_the_response() -> None:
    trajectory = await play(Single, ["a long answer in many words"], config={"prompt_length": 50, "response_length": 3})
    assert len(trajectory.segments[1].token_ids) == 3
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    uncut = await play(Cutting, ["a long answer in many words"])
    assert uncut.segments[1].left_out == ((2, len(uncut.segments[1].token_ids)),)
    assert trained(uncut) == [uncut.segments[1].token_ids[:2].tolist()]


class Cutting(Single):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_length = 2


class WithTools(AgentLoopBase):
    """Calls the environment's tools; asks a second opinion that it throws away."""

    def __init__(self, *args: Any, opinions: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.opinions = opinions

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        prompt = await self.apply_chat_template(kwargs["raw_prompt"], tools=self.episode.tools)
        response: list[int] = []
        mask: list[int] = []
        while True:
            output = await self.server_manager.generate(prompt_ids=prompt + response, sampling_params=sampling_params)
            response += output
            mask += [1] * len(output)
            calls = output.message.get("tool_calls") or ()
            if not calls:
                break
            answers = [await self.episode.call(call) for call in calls]
            SEEN.extend(answer.text for answer in answers)
            messages = [{"role": "tool", "content": answer.text} for answer in answers]
            added = await self.apply_chat_template(messages, remove_system_prompt=True)
            response += added
            mask += [0] * len(added)
        for _ in range(self.opinions):
            await self.server_manager.generate(prompt_ids=self.tokenizer.encode("Is that so?"))
        return [AgentLoopOutput(prompt_ids=prompt, response_ids=response, response_mask=mask)]


def calls(*tool_calls: ToolCall) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(tool_calls)}


LINES = [
    calls(ToolCall("", "team_of", {"person": TABLE.person})),
    calls(ToolCall("", "manager_of", {"team": TABLE.teams[TABLE.person]})),
    TABLE.answer,
    "Yes.",
]


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3_1"])
async def test_loop_with_tools_is_recorded_as_sampled(family) -> None:
    trajectory = await play(WithTools, LINES, env="lookup", family=family)
    assert trajectory.error is None
    assert [TABLE.teams[TABLE.person], TABLE.answer] == SEEN
    assert trajectory.metrics["tool_calls"] == 2
    turns = [segment for segment in trajectory.segments if segment.sampled]
    assert [turn.left_out is not None for turn in turns] == [False, False, False, True]
    assert trained(trajectory) == [[number for turn in turns[:3] for number in turn.token_ids.tolist()]]
    assert trajectory.forks() == {"restart": 1}


async def test_the_environment_scores_the_last_message() -> None:
    trajectory = await play(WithTools, LINES[:3], env="lookup", config={"opinions": 0})
    assert trajectory.rewards == [(None, "score", 1.0)]
    assert trajectory.stop_reason is StopReason.COMPLETED


class Answers(AgentLoopBase):
    """Returns what a test says."""

    make: Any = None

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        output = await self.server_manager.generate(prompt_ids=prompt, sampling_params=sampling_params)
        return type(self).make(self, prompt, output)


def answer(prompt: list[int], output: TokenOutput, **changes: Any) -> AgentLoopOutput:
    plain = {"prompt_ids": prompt, "response_ids": output.token_ids, "response_mask": [1] * len(output)}
    return AgentLoopOutput(**{**plain, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda self, prompt, output: None, "run returned None: it must return AgentLoopOutput"),
        (lambda self, prompt, output: [], "run returned []"),
        (lambda self, prompt, output: [answer(prompt, output), 3], "it must return AgentLoopOutput"),
        (
            lambda self, prompt, output: answer(
                prompt,
                output,
                response_ids=self.tokenizer.encode("43"),
                response_mask=[1] * len(self.tokenizer.encode("43")),
            ),
            "returned what the model did not sample",
        ),
        (lambda self, prompt, output: answer(prompt, output, response_mask=[1]), "response_mask has 1 entries"),
        (lambda self, prompt, output: answer(prompt, output, response_logprobs=[0.1]), "returned 1 response_logprobs"),
        (lambda self, prompt, output: answer(prompt, output, multi_modal_data={"images": [1]}), "images: this model"),
        (lambda self, prompt, output: answer(prompt, output, reward_score=float("inf")), "must be a finite number"),
    ],
)
async def test_an_output_that_is_none_ends_in_an_error(monkeypatch, make, message) -> None:
    monkeypatch.setattr(Answers, "make", make)
    trajectory = await play(Answers, ["42 and more"])
    assert message in trajectory.error
    assert trajectory.stop_reason is StopReason.ERROR


async def test_last_of_several_outputs_is_scored(monkeypatch) -> None:
    def make(self, prompt, output):
        return [answer(prompt, output, reward_score=0.25), answer(prompt, output, reward_score=0.5)]

    monkeypatch.setattr(Answers, "make", make)
    trajectory = await play(Answers, ["42"])
    assert trajectory.rewards == [(None, "reward", 0.5)]


class Asks(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        raised = []
        for params in ({"repetition_penalty": 1.2}, {"n": 2}, {"beams": 3}, {"temperature": 0.1}):
            try:
                await self.server_manager.generate(prompt_ids=[1, 2], sampling_params=sampling_params | params)
            except Exception as error:
                raised.append(str(error))
        try:
            await self.server_manager.generate(prompt_ids=[1, 2], image_data=["x"])
        except AgentError as error:
            raised.append(str(error))
        SEEN.extend(raised)
        wishes = sampling_params | {"max_new_tokens": 2, "stop": "x", "stop_token_ids": [7], "seed": 5, "min_p": 0.1}
        first = await self.server_manager.generate(prompt_ids=[5, 6], sampling_params=wishes)
        SEEN.append((list(first), first.stop_reason, first.num_preempted, first.extra_fields["max_global_steps"]))
        try:
            while True:
                await self.server_manager.generate(prompt_ids=[5, 6], sampling_params=sampling_params)
        except BudgetExceeded:
            SEEN.append("spent")
            raise


async def test_sampling_parameters_are_read_or_refused() -> None:
    trajectory = await play(Asks, [[8, 9, 10, 11]] * 9, max_turns=3)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert "repetition_penalty is 1.2: it must be 1.0" in SEEN[0]
    assert "n is 2: it must be 1" in SEEN[1]
    assert "'beams' is unknown; known:" in SEEN[2]
    assert "params.temperature is 0.1, but this trajectory is trained at 1.0" in SEEN[3]
    assert "image_data: this model's renderer places text only" in SEEN[4]
    assert SEEN[5:] == [([8, 9], "length", -1, 0), "spent"]


class Tokenizes(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        tokenizer = self.tokenizer
        messages = kwargs["raw_prompt"]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        closed = tokenizer.apply_chat_template(messages)
        assert ids[: len(closed)] == closed
        assert len(ids) > len(closed)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.encode(text) == ids
        assert tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] == closed
        tool = {"type": "function", "function": {"name": "look", "description": "Looks."}}
        assert "look" in tokenizer.decode(tokenizer.apply_chat_template(messages, tools=[tool]))
        with pytest.raises(ToolSchemaError, match="a tool schema without a name"):
            tokenizer.apply_chat_template(messages, tools=[{"nome": "x"}])
        end = tokenizer.eos_token_id
        assert tokenizer.pad_token_id == end
        assert tokenizer.decode([*tokenizer.encode("ab"), end], skip_special_tokens=True) == "ab"
        assert tokenizer.batch_decode([tokenizer.encode("a"), tokenizer.encode("b")]) == ["a", "b"]
        assert tokenizer.decode(tokenizer.encode("a")[0]) == "a"
        added = await self.apply_chat_template(messages, remove_system_prompt=True)
        assert [*self.system_prompt, *added] == ids
        assert await self.process_multi_modal_info(messages) == {}
        SEEN.append(len(self.system_prompt))
        output = await self.server_manager.generate(prompt_ids=ids)
        return answer(ids, output)


@pytest.mark.parametrize(("family", "system"), [("qwen3", False), ("qwen2_5", True)])
async def test_the_tokenizer_of_a_loop(family, system) -> None:
    trajectory = await play(Tokenizes, ["42"], family=family)
    assert trajectory.error is None
    # Qwen2.5 puts its system prompt before the first message.
    assert [length > 0 for length in SEEN] == [system]


class Abstract(AgentLoopBase):
    pass


class Picky(AgentLoopBase):
    def __init__(self, *args: Any, size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("loop", "config", "message"),
    [
        (Abstract, {}, "defines no run()"),
        (Asks, {"size": 1}, "has no constructor that takes 'size'"),
        (Picky, {}, "does not take its configuration"),
        (Picky, {"size": 1, "response_length": 0}, "response_length is 0: it must be an integer above 0"),
    ],
)
def test_a_loop_is_checked_before_anything_starts(loop, config, message) -> None:
    with pytest.raises(AgentError) as raised:
        make_agent(f"{__name__}:{loop.__qualname__}", **config)
    assert message in str(raised.value)


def test_names_and_small_parts() -> None:
    with pytest.raises(RegistryError, match="is taken by"):
        register("test-loop-single")(Picky)
    assert AgentLoopMetrics(tool_calls=1).num_preempted == -1
    with pytest.raises(TypeError, match="respons_ids"):
        AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[], respons_ids=[])
