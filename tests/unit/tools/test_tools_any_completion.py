"""Whatever bytes a model samples: its message is answered or is the final one, and no step raises."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.property_tests import examples
from turnwise import ToolEnv, function_tool
from turnwise.envs import reset_env, step_env
from turnwise.model.canonical import canonical_messages
from turnwise.types import ToolCall, as_ids

FAMILIES = (
    "qwen3",
    "qwen3_6",
    "llama3_1",
    "glm4moe",
    "gptoss",
    "own",
    "mistral",
    "lfm2",
    "deepseekv3",
    "kimi",
    "minimax",
)
PIECES = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [
            b'{"name": "add", "arguments": {"a": 1, "b": 2}}',
            b'{"name": "add", "parameters": {"a": "x"}}',
            b"add",
            b"{",
            b"}",
            b"[add(a=1, b=2)]",
            b"</think>",
            b"<think>",
            b"\n",
            b"<function=add>",
            b"</function>",
            b"<parameter=a>",
            b"null",
            b'{"tool": "add", "with": {"a": 1e999, "b": NaN}}',
            b'{"name": "' + b"n" * 5000 + b'", "arguments": {}}',
            b'{"name": "add", "arguments": ' + b'{"a":' * 600,
            b"\xff\xfe",
            b"\xed\xa0\x80",
        ]
    ),
)


class World(ToolEnv):
    max_invalid_calls = 0

    def reset(self, task=None, *, seed=None):
        return "go", {}

    @function_tool(inline=True)
    def add(self, a: int, b: int = 0) -> int:
        return a + b

    def score(self, final):
        return 0.5


@settings(max_examples=examples(25), deadline=None)
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_any_bytes_are_answered_or_final(family, data):
    renderer = renderer_for(family)
    added = sorted(renderer._tokens.added.values())
    ids: list[int] = []
    for piece in data.draw(st.lists(PIECES | st.sampled_from(added), max_size=10)):
        ids += [piece] if isinstance(piece, int) else renderer._tokens.encode(piece.decode("utf-8", "replace"))
    tools = [World.tool_methods["add"].schema]
    prompt = renderer.render(canonical_messages([{"role": "user", "content": "go"}]), tools)
    message = renderer.parse(as_ids(ids), prompt, tools)
    calls = message.get("tool_calls") or []
    # The session gives ids to calls that have none.
    message["tool_calls"] = calls = [
        ToolCall(f"c{number}", call.name, call.arguments, call.raw, call.error) for number, call in enumerate(calls)
    ]

    async def play():
        env = World()
        await reset_env(env)
        return await step_env(env, message)

    result = asyncio.run(play())
    if not calls:
        assert (result.terminated, result.reward) == (True, 0.5)
        return
    assert [answer["tool_call_id"] for answer in result.observation] == [call.id for call in calls]
    for call, answer in zip(calls, result.observation, strict=True):
        answer["content"].encode()
        if call.error is not None:
            error = json.loads(answer["content"])["error"]
            assert error["message"]
            assert len(answer["content"]) < 6000
