"""What goes wrong with tools elsewhere, each from what the model samples to what is trained: here it must not.

Every test rolls out through the runner, with chat templates that real models have, a byte-level tokenizer and a model
that samples exact ids.
"""

import json
from typing import Annotated, Any, Literal

import annotated_types
import pytest

from support.chat.model_dirs import renderer_for
from turnwise import BaseTool, ToolEnv, ToolResponse, function_tool
from turnwise.envs import register
from turnwise.envs.results import ScoreParts
from turnwise.errors import EnvError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeSpec, RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.experience import build_experience, collect
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import StopReason, ToolCall

CALLS = {
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "qwen3_6": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "glm4moe": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>"
    ),
}
STOPS = {"qwen3": "<|im_end|>", "qwen3_6": "<|im_end|>", "glm4moe": "<|user|>"}
ran: list[tuple[int, int]] = []


class Counter(BaseTool):
    """Counts its calls: 1, 2, 3 ..., each worth 0.25; its state is worth 10 for each at the end."""

    lives: list[list[str]] = []  # noqa: RUF012 - what all of them went through

    def __init__(self):
        super().__init__({}, {"name": "count", "parameters": {"type": "object", "properties": {}}})
        self.counts: dict[str, int] = {}
        self.log: list[str] = []
        self.lives.append(self.log)

    async def create(self, instance_id=None, **kwargs):
        name, response = await super().create(instance_id)
        self.counts[name] = 0
        self.log.append("create")
        return name, response

    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += 1
        self.log.append("execute")
        return ToolResponse(f"count {self.counts[instance_id]}"), 0.25, {"seen": 1.0}

    async def calc_reward(self, instance_id, **kwargs):
        self.log.append("calc_reward")
        return 10.0 * self.counts[instance_id]

    async def release(self, instance_id, **kwargs):
        self.log.append("release")
        raise RuntimeError("it failed to let go")


class Search(BaseTool):
    """Reports like verl's SearchTool: a status among its numbers, and None where it knows nothing."""

    def __init__(self):
        super().__init__({}, {"name": "search", "parameters": {"type": "object", "properties": {}}})

    async def execute(self, instance_id, parameters, **kwargs):
        return (
            ToolResponse("found 3"),
            0.5,
            {"query_count": 1, "status": "success", "api_request_error": None, "ratio": float("nan"), "hits": [1, 2]},
        )


@register("tools_defects")
class World(ToolEnv):
    tools = (Counter,)

    def reset(self, task=None, *, seed=None):
        return "What is it?", {}

    @function_tool(inline=True)
    def add(self, a: int, b: int) -> int:
        ran.append((a, b))
        return a + b

    @function_tool
    def read(self, words: int) -> str:
        return " ".join(f"word{number}" for number in range(words))

    def score(self, final):
        return 1.0 if final is not None and "done" in final["content"] else 0.0


@register("tools_reports")
class Reports(World):
    tools = (Counter, Search)


@register("tools_noted")
class Noted(World):
    def score(self, final):
        return ScoreParts({"score": 0.5}, notes={"why": "half of it"})


NAMES = {World: "tools_defects", Reports: "tools_reports", Noted: "tools_noted"}


@pytest.fixture(autouse=True)
def fresh():
    ran.clear()
    Counter.lives.clear()


def ids(family: str, text: str) -> list[int]:
    """What a model samples when it says this and stops; markup in it becomes control ids."""
    return renderer_for(family)._tokens.encode(text + STOPS[family])


async def episode(lines, *, family="qwen3", context_length=20_000, world=World, **settings):
    renderer = renderer_for(family)
    client = ScriptedClient(renderer, lines, tools=[tool.schema for tool in world().toolset().values()])
    Counter.lives.clear()
    config = RolloutConfig.model_validate({"env": {"name": NAMES[world]}, **settings})
    runner = EpisodeRunner(config, client, renderer, context_length=context_length)
    outcome = await runner.run(EpisodeSpec(Task("t", ""), "g"))
    return outcome.trajectories[0], client


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", name, arguments)]}


def answers(trajectory) -> list[str]:
    return [m["content"] for segment in trajectory.segments for m in segment.messages if m["role"] == "tool"]


class TestCallsInsideReasoning:
    @pytest.mark.parametrize("family", list(CALLS))
    @pytest.mark.parametrize("closed", [True, False])
    async def test_calls_inside_reasoning_are_answered_and_not_executed(self, family, closed):
        opened = "" if family == "qwen3_6" else "<think>\n"
        thought = f"{opened}I could say {CALLS[family]} or not.\n"
        first = ids(family, f"{thought}</think>\n\nWait." if closed else thought)
        trajectory, client = await episode([first, "done"], family=family)
        assert ran == []
        assert trajectory.error is None
        [answer] = answers(trajectory)
        assert json.loads(answer)["error"]["type"] == "unusable_call"
        assert "inside the reasoning" in answer
        assert answer[:40] in client.requests[1].text, "the model reads why"
        assert trajectory.stop_reason is StopReason.COMPLETED

    @pytest.mark.parametrize("family", list(CALLS))
    async def test_call_after_reasoning_is_executed(self, family):
        opened = "" if family == "qwen3_6" else "<think>\n"
        first = ids(family, f"{opened}Hm.\n</think>\n\n{CALLS[family]}")
        trajectory, _ = await episode([first, "done"], family=family)
        assert (ran, answers(trajectory)) == ([(1, 2)], ["3"])


class TestMalformedCalls:
    BROKEN = (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1,}\n</tool_call>',
        '<tool_call>\n{"name": "add", "argum',
        '<tool_call>\n{"arguments": {"a": 1, "b": 2}}\n</tool_call>',
        "<tool_call>\nadd(1, 2)\n</tool_call>",
        '<tool_call>\n{"name": "add", "arguments": [1, 2]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "ad", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    )

    @pytest.mark.parametrize("text", BROKEN)
    async def test_model_reads_errors_and_continues(self, text):
        trajectory, client = await episode([ids("qwen3", text), called("add", a=1, b=2), "done"])
        assert len(client.requests) == 3, "the episode went on"
        refused, right = answers(trajectory)
        assert json.loads(refused)["error"]["message"]
        assert (right, ran) == ("3", [(1, 2)])
        assert (trajectory.reward, trajectory.metrics["tool_errors"]) == (1.0, 1.0)

    async def test_invalid_calls_in_a_row_end_the_episode_by_name(self):
        trajectory, client = await episode([ids("qwen3", self.BROKEN[0])] * 9)
        assert (len(client.requests), trajectory.stop_reason, trajectory.error) == (3, StopReason.INVALID_CALLS, None)

    @pytest.mark.parametrize("family", list(CALLS))
    async def test_call_cut_by_a_length_limit_is_not_executed(self, family):
        full_ids = ids(family, CALLS[family])
        opened = ids(family, "</think>\n\n")[:-1] if family == "qwen3_6" else []
        for length in range(2, len(full_ids) - 1, 3):
            sampled = [*opened, *full_ids[:length]]
            trajectory, _ = await episode([sampled], family=family, max_tokens_per_turn=len(sampled))
            assert trajectory.segments[-1].finish_reason == "length"
            if ran:
                # Only a call that is complete except its closing mark may be taken as one.
                assert ran == [(1, 2)]
                assert length >= len(full_ids) - 3
                ran.clear()
            else:
                assert trajectory.stop_reason is StopReason.MAX_TOKENS


class TestParallelCalls:
    async def test_all_calls_are_executed_and_answered_in_order(self):
        calls = [ToolCall("", "add", {"a": number, "b": 100}) for number in range(6)]
        calls.insert(3, ToolCall("", "nothing", {}))
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        trajectory, client = await episode([message, "done"])
        texts = answers(trajectory)
        assert texts[:3] + texts[4:] == [str(number + 100) for number in range(6)]
        assert json.loads(texts[3])["error"]["type"] == "unknown_tool"
        prompt = client.requests[1].text
        positions = [prompt.index(f"<tool_response>\n{text}\n</tool_response>") for text in texts]
        assert positions == sorted(positions)
        assert ran == [(number, 100) for number in range(6)]


class TestLongAnswers:
    async def test_overflowing_result_is_cut_by_tokens(self):
        trajectory, client = await episode([called("read", words=3000), "done"], context_length=3000)
        [answer] = answers(trajectory)
        assert answer.startswith("word0 word1 ")
        assert "characters cut" in answer
        assert answer.endswith(" word2999")
        assert len(client.requests[1].prompt) < 3000 <= renderer_for("qwen3").count(answer) + 900
        assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 1.0)
        assert trajectory.metrics["tool_answers_cut"] == 1.0

    async def test_results_share_the_remaining_room_and_short_texts_stay_whole(self):
        calls = [ToolCall("", "read", {"words": words}) for words in (3000, 2, 2000)]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        trajectory, _ = await episode([message, "done"], context_length=3000)
        first, second, third = answers(trajectory)
        assert second == "word0 word1"
        count = renderer_for("qwen3").count
        assert abs(count(first) - count(third)) < 40
        assert (trajectory.stop_reason, trajectory.metrics["tool_answers_cut"]) == (StopReason.COMPLETED, 2.0)

    async def test_fitting_results_are_unchanged(self):
        lines = [called("read", words=60), "done"]
        full_ids, client = await episode(lines)
        [answer] = answers(full_ids)
        needed = len(client.requests[1].prompt)
        for context_length in (needed + 1, needed + 200, needed + 2000):
            trajectory, client = await episode(lines, context_length=context_length)
            assert len(client.requests) == 2
            [texts] = answers(trajectory)
            assert texts.startswith("word0 ")
            assert (
                (texts == answer) == (context_length == needed + 2000) == ("tool_answers_cut" not in trajectory.metrics)
            )
            [sample] = to_samples(trajectory).rows
            prompt = client.requests[1].prompt
            assert sample.input_ids[: len(prompt)].tolist() == prompt.tolist()
            assert len(prompt) < len(sample.input_ids) <= context_length

    async def test_full_context_ends_the_episode_as_context_overflow(self):
        trajectory, client = await episode([called("read", words=5)])
        full = len(client.requests[0].prompt) + len(trajectory.segments[-1].token_ids) + 3
        trajectory, client = await episode([called("read", words=5), "done"], context_length=full)
        assert len(client.requests) == 1
        assert (trajectory.stop_reason, trajectory.error) == (StopReason.CONTEXT_OVERFLOW, None)
        assert [segment.kind for segment in trajectory.segments] == ["context", "sampled"]


async def test_the_model_reads_the_whole_schema():
    class Deep(ToolEnv):
        def reset(self, task=None, *, seed=None):
            return "go", {}

        @function_tool
        def pick(
            self,
            pairs: Annotated[list[tuple[int, str]], annotated_types.MinLen(1)],
            mode: Literal["fast", "slow"] | None = "fast",
            weights: dict[str, Annotated[float, annotated_types.Interval(ge=0, le=1)]] | int = 3,
        ) -> str:
            return "picked"

        def score(self, final):
            return 1.0

    register("tools_defects_deep", Deep)
    renderer = renderer_for("qwen3")
    client = ScriptedClient(renderer, ["done"])
    config = RolloutConfig.model_validate({"env": {"name": "tools_defects_deep"}})
    await EpisodeRunner(config, client, renderer, context_length=5000).run(EpisodeSpec(Task("t", ""), "g"))
    text = client.requests[0].text
    tool_schema = json.JSONDecoder().raw_decode(text, text.index('{"type": "function"'))[0]
    assert tool_schema["function"]["parameters"]["properties"] == {
        "pairs": {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
                "maxItems": 2,
            },
            "minItems": 1,
        },
        "mode": {"anyOf": [{"type": "string", "enum": ["fast", "slow"]}, {"type": "null"}], "default": "fast"},
        "weights": {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1}},
                {"type": "integer"},
            ],
            "default": 3,
        },
    }


class TestBaseTools:
    async def test_instance_of_a_tool_lives_through_the_episode(self):
        lines = [called("count"), called("count"), called("add", a=1, b=1), called("count"), "done"]
        trajectory, _ = await episode(lines)
        assert [text for text in answers(trajectory) if "count" in text] == ["count 1", "count 2", "count 3"]
        [log] = filter(None, Counter.lives)
        assert log == ["create", "execute", "execute", "execute", "calc_reward", "release"]
        # A release that fails costs no trajectory.
        assert (trajectory.error, trajectory.metrics["close_errors"]) == (None, 1.0)

    async def test_tool_rewards_reach_the_turns_the_trajectory_and_the_advantages(self):
        """Two members of a group differ in their tool rewards only: that is what is trained."""
        renderer = renderer_for("qwen3")
        calls = {"0": 2, "1": 0}

        def script(request):
            member = request.session_id.rpartition("/")[2].partition(".")[0]
            return called("count") if request.number < calls[member] else "done"

        client = ScriptedClient(renderer, script, tools=[tool.schema for tool in World().toolset().values()])
        config = RolloutConfig.model_validate({"env": {"name": "tools_defects"}, "concurrency": 1})
        producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer))
        [group] = await producer.gather([RolloutRequest(Task("t", ""), group_size=2)])
        await producer.close()
        with_tools, without = sorted(group.trajectories, key=lambda trajectory: trajectory.id)
        turns = [turn.turn_id for turn in with_tools.turns()]
        assert with_tools.rewards == [
            (turns[0], "tool/count", 0.25),
            (turns[1], "tool/count", 0.25),
            (turns[2], "score", 1.0),
            (turns[2], "tool/count", 20.0),
        ]
        assert (with_tools.reward, without.reward) == (21.5, 1.0)
        experience = build_experience(collect([group]), AlgorithmConfig(), temperature=1.0)
        advantages = {row.sample.trajectory_id: row.advantage for row in experience.rows}
        assert advantages[with_tools.id] == -advantages[without.id] > 0.7
        assert experience.metrics["reward/by_name/tool/count"] == 20.5 / 2


class TestMetricsThatAreNoNumbers:
    @pytest.mark.parametrize("final", [False, True])
    async def test_unusable_metrics_are_kept_as_notes_and_counted(self, final):
        metrics = {
            "role": "assistant",
            "content": "",
            "tool_calls": [ToolCall("", "search", {}), ToolCall("", "count", {})],
        }
        trajectory, _ = await episode([metrics, "done"] if final else [called("search"), "done"], world=Reports)
        assert (trajectory.stop_reason, trajectory.error, trajectory.reward) == (
            (StopReason.COMPLETED, None, 11.75) if final else (StopReason.COMPLETED, None, 1.5)
        )
        assert trajectory.turn_notes == {
            "t0": {
                "search/status": "success",
                "search/api_request_error": "None",
                "search/ratio": "nan",
                "search/hits": "[1, 2]",
            }
        }
        assert trajectory.turn_metrics["t0"]["tool_notes"] == trajectory.metrics["tool_notes"] == 4.0
        assert trajectory.metrics["search/query_count"] == 1.0
        assert Trajectory.from_bytes(trajectory.to_bytes()).turn_notes == trajectory.turn_notes

    @pytest.mark.parametrize("ends", [True, False])
    async def test_notes_of_a_score_are_kept(self, ends):
        lines = ["done"] if ends else [called("add", a=1, b=1)]
        trajectory, _ = await episode(lines, world=Noted, max_turns=1)
        assert trajectory.reward == 0.5
        assert trajectory.turn_notes == {"t0" if ends else "": {"why": "half of it"}}

    def test_notes_are_texts_whatever_a_tool_hands_over(self):
        class Odd:
            def __str__(self):
                raise RuntimeError("no text")

        response = ToolResponse(metrics={"odd": Odd(), 7: True, "half": "\ud83d"})
        assert response.metrics == {"7": 1.0}
        assert response.notes["odd"] == "(Odd: RuntimeError)"
        response.notes["half"].encode()
        with pytest.raises(EnvError, match=r"ToolResponse.notes is \[1\]: it must be a dict of texts"):
            ToolResponse(notes=[1])
