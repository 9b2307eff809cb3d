"""What a renderer says, it reads back as the same message: every format, any text, any arguments."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import FAMILIES, renderer_for
from support.property_tests import examples
from turnwise.errors import RenderError
from turnwise.model.canonical import canonical_arguments, canonical_messages
from turnwise.types import Message, ToolCall, ToolSchema, as_ids

TOOLS = [
    ToolSchema(
        "lookup",
        "Find a row.",
        {
            "type": "object",
            "properties": {
                "key": {"type": "string"},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "deep": {"type": "boolean"},
                "maybe": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "where": {"$ref": "#/$defs/where"},
                "rows": {"type": "array"},
            },
            "$defs": {"where": {"type": "object"}},
        },
    ),
    ToolSchema("now", ""),
]
# A prompt of DeepSeek opens reasoning that its template never writes into a history: it can say no message.
SAYING = [name for name in FAMILIES if name != "deepseekv3"]

text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Co", "Cn"]), max_size=40).map(
    lambda text: unicodedata.normalize("NFC", text)  # as the tests' tokenizers do: two keys may become one
)
word = st.from_regex(r"[A-Za-z][A-Za-z0-9 ,.!?é数\n-]{0,40}", fullmatch=True)
json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "key": text,
        "count": st.integers(-(10**30), 10**30),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "deep": st.booleans(),
        "maybe": st.none() | st.dictionaries(text, json_value, max_size=2),
        "where": st.dictionaries(text, json_value, max_size=2),
        "rows": st.lists(json_value, max_size=3),
    },
)
relaxed = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assistant(content: str, reasoning: str, calls: list[dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [ToolCall(f"call{n}", "lookup", value) for n, value in enumerate(calls)]
    return message


def read_back(family: str, message: Message) -> Message:
    renderer = renderer_for(family)
    ids = renderer.completion(message, TOOLS)
    assert int(ids[-1]) in renderer.stop_ids
    assert not any(int(number) in renderer.stop_ids for number in ids[:-1])
    prompt = renderer.render(canonical_messages([{"role": "user", "content": "hi"}]), TOOLS)
    return renderer.parse(ids, prompt, TOOLS)


def check(family: str, message: Message) -> None:
    seen = renderer_for(family)._tokens.seen
    back = read_back(family, message)
    assert seen(str(back["content"])).strip() == seen(str(message["content"])).strip()
    assert seen(back.get("reasoning_content") or "").strip() == seen(message.get("reasoning_content") or "").strip()
    expected_calls, parsed_calls = message.get("tool_calls", ()), back.get("tool_calls", ())
    assert [call.error for call in parsed_calls] == [None] * len(expected_calls)
    for one, other in zip(expected_calls, parsed_calls, strict=True):
        assert other.name == one.name
        assert seen(canonical_arguments(other.arguments)[0]) == seen(canonical_arguments(one.arguments)[0])


@pytest.mark.parametrize("family", SAYING)
@relaxed
@given(data=st.data())
def test_ordinary_messages_are_said_and_read_back(family: str, data: st.DataObject) -> None:
    says = FAMILIES[family].says
    count = data.draw(st.integers(0, 2 if "two calls" in says else 1))
    calls = data.draw(st.lists(arguments, min_size=count, max_size=count))
    content = data.draw(word) if not calls or ("text and call" in says and data.draw(st.booleans())) else ""
    reasoning = data.draw(word) if "reasoning" in says and data.draw(st.booleans()) else ""
    if family == "gptoss" and calls:
        content = ""
    check(family, assistant(content, reasoning, calls))


@pytest.mark.parametrize("family", SAYING)
@relaxed
@given(content=text, reasoning=text, calls=st.lists(arguments, max_size=2))
def test_any_message_is_read_back_or_refused(family: str, content: str, reasoning: str, calls: list[Any]) -> None:
    try:
        renderer_for(family).completion(assistant(content, reasoning, calls), TOOLS)
    except RenderError:
        return
    check(family, assistant(content, reasoning, calls))


@pytest.mark.parametrize("family", SAYING)
def test_normalized_text_parses_back_equal(family: str) -> None:
    odd = "e\u0301 \u2126"
    renderer = renderer_for(family)
    back = read_back(family, assistant("", "", [{"key": odd, "where": {"e\u0301": 1, "z": 2, "\u2126": 3}}]))
    (call,) = back["tool_calls"]
    assert call.arguments == {"key": renderer._tokens.seen(odd), "where": {"\u00e9": 1, "z": 2, "\u03a9": 3}}


@pytest.mark.parametrize("family", list(FAMILIES))
@relaxed
@given(data=st.data())
def test_parsing_never_raises_on_random_ids(family: str, data: st.DataObject) -> None:
    renderer = renderer_for(family)
    markers = sorted(renderer._tokens.added.values())
    ids = data.draw(st.lists(st.sampled_from(markers) | st.integers(0, 1200), max_size=40))
    tail = data.draw(st.lists(st.sampled_from(markers) | st.integers(0, 1200), max_size=8))
    message = renderer.parse(as_ids(ids), as_ids(tail), TOOLS)
    assert message["role"] == "assistant"
    assert isinstance(message["content"], str)
    for call in message.get("tool_calls", ()):
        assert call.error or call.name
        str(call).encode()


@pytest.mark.parametrize("family", SAYING)
@relaxed
@given(data=st.data())
def test_every_prefix_and_mutation_of_a_completion_parses(family: str, data: st.DataObject) -> None:
    renderer = renderer_for(family)
    says = FAMILIES[family].says
    calls = [{"key": "a", "count": 1}, {"key": "</tool_call>", "deep": True}][: 2 if "two calls" in says else 1]
    reasoning = "Look it up." if "reasoning" in says else ""
    ids = renderer.completion(assistant("", reasoning, calls), TOOLS)
    tail = as_ids(renderer._tokens.encode(renderer._facts.prompt))
    full_calls = renderer.parse(ids, tail, TOOLS)["tool_calls"]
    closed = 0
    for length in range(len(ids)):
        parsed_calls = renderer.parse(ids[:length], tail, TOOLS).get("tool_calls", ())
        assert not any(call.error for call in parsed_calls), "a call that was cut off is no call"
        assert list(parsed_calls) == list(full_calls[: len(parsed_calls)]), "closed calls stand as they were"
        assert len(parsed_calls) >= closed
        closed = len(parsed_calls)
    mutated = np.array(ids)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(ids) - 1))
        mutated[at] = data.draw(st.sampled_from(ids.tolist()) | st.integers(0, 1200))
    assert renderer.parse(mutated, tail, TOOLS)["role"] == "assistant"
