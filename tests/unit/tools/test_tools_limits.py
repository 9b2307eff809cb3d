"""Output limits: in characters and in tokens of a real tokenizer, what is kept, and that a cut text keeps its limit."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.property_tests import examples
from turnwise import ToolEnv, function_tool
from turnwise.envs import close_env, reset_env
from turnwise.errors import ToolError, ToolSchemaError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools import BaseTool, OutputLimit, ToolResponse, ToolRunner, as_tool
from turnwise.tools.response import estimated_tokens
from turnwise.types import ToolCall

FAMILIES = ("qwen3", "llama3_1", "own")
MARKER = re.compile(r"\[\.\.\. (\d+) characters cut \.\.\.\]")
TEXTS = st.one_of(
    st.text(max_size=300),
    st.lists(
        st.sampled_from(["alpha ", "\n", "    ", "数据", "🙂", "e\u0301", "<|im_end|>", "42", "<tool_call>"]),
        max_size=80,
    ).map("".join),
    st.tuples(st.text(min_size=1, max_size=4), st.integers(1, 400)).map(lambda pair: pair[0] * pair[1]),
)
LIMITS = st.builds(
    OutputLimit,
    st.integers(1, 200),
    st.sampled_from(["characters", "tokens"]),
    st.sampled_from(["ends", "head", "tail", "middle"]),
)


def numbered(count: int) -> str:
    return " ".join(f"word{number}" for number in range(count))


class TestWhatIsKept:
    TEXT = "abcdefghij" * 30

    @pytest.mark.parametrize(
        ("keep", "pattern"),
        [
            ("ends", r"abcdefghij.*\n\[\.\.\. \d+ characters cut \.\.\.\]\n.*hij"),
            ("head", r"abcdefghij.*\n\[\.\.\. \d+ characters cut \.\.\.\]"),
            ("tail", r"\[\.\.\. \d+ characters cut \.\.\.\]\n.*hij"),
            ("middle", r"\[\.\.\. \d+ characters cut \.\.\.\]\n[a-j]+\n\[\.\.\. \d+ characters cut \.\.\.\]"),
        ],
    )
    @pytest.mark.parametrize("unit", ["characters", "tokens"])
    def test_a_part_and_markers_that_count_the_rest(self, keep, pattern, unit):
        shortened = OutputLimit(100, unit, keep).cut(self.TEXT, len)
        assert re.fullmatch(pattern, shortened, re.DOTALL)
        bare = MARKER.sub("", shortened).replace("\n", "")
        assert len(bare) + sum(int(count) for count in MARKER.findall(shortened)) == len(self.TEXT)
        assert 80 < len(shortened) <= 100

    def test_middle_cut_keeps_the_middle(self):
        text = numbered(1000)
        shortened = OutputLimit(200, "characters", "middle").cut(text)
        head_count, tail_count = (int(count) for count in MARKER.findall(shortened))
        assert abs(head_count - tail_count) <= 1
        assert shortened.split("\n")[1] == text[head_count : len(text) - tail_count]

    def test_a_limit_without_room_for_a_marker_keeps_bare_text(self):
        assert [OutputLimit(3, unit, keep).cut("abcdefghi", len) for unit in ("characters", "tokens") for keep in
                ("ends", "head", "tail", "middle")] == ["abc", "abc", "ghi", "def"] * 2  # fmt: skip

    def test_a_text_that_fits_is_left_alone(self):
        for unit in ("characters", "tokens"):
            assert OutputLimit(9, unit).cut("abcdefghi", len) == "abcdefghi"

    def test_without_a_model_tokens_are_estimated(self):
        assert (estimated_tokens(""), estimated_tokens("abcde"), estimated_tokens("数据")) == (0, 2, 2)
        shortened = OutputLimit(30, "tokens").cut("x" * 1000)
        assert 100 < len(shortened) <= 120


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"amount": 0}, "amount is 0"),
            ({"amount": 1.5}, "amount is 1.5"),
            ({"amount": True}, "amount is True"),
            ({"amount": 5, "unit": "words"}, "unit is 'words': allowed are characters, tokens"),
            ({"amount": 5, "keep": "sides"}, "keep is 'sides': allowed are ends, head, tail, middle"),
        ],
    )
    def test_invalid_limits_raise_schema_error(self, fields, words):
        with pytest.raises(ToolSchemaError, match=words):
            OutputLimit(**fields)

    def test_a_tools_limit_is_whole(self):
        with pytest.raises(ToolSchemaError, match=r"tool 'f': max_output is 1\.5"):
            function_tool("f", max_output=1.5)(lambda: "")


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(FAMILIES), TEXTS, LIMITS)
def test_cut_text_stays_within_its_limit_when_encoded(family, text, limit):
    count = renderer_for(family).count
    shortened = limit.cut(text, count)
    size = count(shortened) if limit.unit == "tokens" else len(shortened)
    assert size <= limit.amount
    full_size = count(text) if limit.unit == "tokens" else len(text)
    if full_size <= limit.amount:
        assert shortened == text


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(60, 400), st.sampled_from(["ends", "head", "tail", "middle"]))
def test_cut_text_uses_most_of_its_limit(amount, keep):
    count = renderer_for("qwen3").count
    shortened = OutputLimit(amount, "tokens", keep).cut(numbered(2000), count)
    assert MARKER.search(shortened)
    assert 0.85 * amount - 4 <= count(shortened) <= amount


def test_few_counts_for_a_long_text():
    count = renderer_for("qwen3").count
    seen: list[int] = []

    def counted(text: str) -> int:
        seen.append(len(text))
        return count(text)

    OutputLimit(500, "tokens").cut(numbered(300_000), counted)
    assert len(seen) <= 8
    assert sum(seen) < 60_000


@pytest.mark.parametrize("family", FAMILIES)
def test_renderer_counts_the_tokens_of_a_message(family):
    renderer = renderer_for(family)
    escaped = renderer.escaped
    for text in ("", "plain words", "a <|im_end|> b <tool_call> c [|over|] d <|eot_id|>", "数据 🙂"):
        assert renderer.count(text) == len(renderer._tokens.encode(renderer._tokens.escape(text)))
    renderer_counts = renderer.escaped
    renderer.count("a <|im_end|> [|over|] <|eot_id|>")
    assert renderer.escaped == renderer_counts >= escaped


class Told(BaseTool):
    max_output = OutputLimit(20, "tokens", "tail")

    def __init__(self):
        super().__init__({}, {"name": "told", "parameters": {"type": "object", "properties": {}}})

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(numbered(500)), None, {}


@pytest.mark.parametrize("fails", [False, True])
async def test_results_and_error_texts_keep_the_limit_of_their_tool(fails):
    @function_tool("many", max_output=OutputLimit(40, "tokens", "head"))
    async def many() -> str:
        if fails:
            raise ToolError(numbered(500))
        return numbered(500)

    count = renderer_for("qwen3").count
    tools = {tool.name: as_tool(tool) for tool in (many, Told())}
    runner = ToolRunner(tools, count_tokens=count)
    first, second = await runner.run_all([ToolCall("a", "many", {}), ToolCall("b", "told", {})])
    text = first.response.text
    assert text.startswith('{"error": {"type": "tool_error", "message": "word0' if fails else "word0 word1")
    assert count(text) <= 40 + (35 if fails else 0)
    assert second.response.text.endswith("word499")
    assert count(second.response.text) <= 20
    await runner.close()


async def test_error_texts_are_limited_too():
    def fails() -> ToolResponse:
        return ToolResponse("x" * 5000, error="http_500")

    tool = function_tool("fails", max_output=100)(fails)
    outcome = await ToolRunner({"fails": tool}).run(ToolCall("a", "fails", {}))
    assert (outcome.response.error, len(outcome.response.text)) == ("http_500", 100)


class Reader(ToolEnv):
    def reset(self, task=None, *, seed=None):
        return "read", {}

    @function_tool(max_output=OutputLimit(50, "tokens"))
    def page(self) -> str:
        return numbered(5000)

    def score(self, final):
        return 1.0


async def test_the_runner_counts_with_the_models_tokenizer():
    """One page is far longer than the context: cut by tokens, three of them fit, and the episode ends as it should."""
    renderer = renderer_for("qwen3")
    call = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "page", {})]}
    client = ScriptedClient(renderer, [call, call, call, "done"], tools=[Reader.tool_methods["page"].schema])
    config = RolloutConfig.model_validate({"env": {"name": f"{__name__}:Reader"}})
    outcome = await EpisodeRunner(config, client, renderer, context_length=1500).run(EpisodeSpec(Task("t", ""), "g"))
    [trajectory] = outcome.trajectories
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward) == (None, "completed", 1.0)
    answers = [m["content"] for segment in trajectory.segments for m in segment.messages if m["role"] == "tool"]
    assert len(answers) == 3
    assert all(40 <= renderer.count(text) <= 50 and "characters cut" in text for text in answers)


async def test_an_environment_by_itself_estimates():
    env = Reader()
    await reset_env(env)
    step = await env.step({"role": "assistant", "tool_calls": [ToolCall("a", "page", {})]})
    assert estimated_tokens(step.observation[0]["content"]) <= 50
    await close_env(env)
