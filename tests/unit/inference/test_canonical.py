"""The canonical form: equal meaning is equal, different meaning is not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import SessionError
from turnwise.inference.canonical import canonical_arguments, canonical_messages, canonical_tools
from turnwise.types import ToolCall, ToolSchema

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def assistant(arguments, **more):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        **more,
    }


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4))
def test_arguments_mean_the_same_however_they_are_written(arguments) -> None:
    forms = [
        arguments,
        json.dumps(arguments),
        json.dumps(arguments, indent=2, ensure_ascii=False),
        json.dumps(dict(reversed(arguments.items()))),
    ]
    assert len({canonical_arguments(form)[0] for form in forms}) == 1
    dumped, value = canonical_arguments(arguments)
    assert canonical_arguments(dumped) == (dumped, value)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"a": 1.0}, {"a": 1}, True),
        ({"a": 1e20}, {"a": 10**20}, True),
        ({"a": -0.0}, {"a": 0}, True),
        ({"a": True}, {"a": 1}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": 1.5}, {"a": 1}, False),
        ("", {}, True),
        (None, {}, True),
        ("null", {}, True),
        ("  {bad ", "{bad", True),
        ("{bad", {}, False),
        ({"a": [1, 2]}, {"a": [2, 1]}, False),
    ],
)
def test_what_is_the_same(first, second, same) -> None:
    one, two = (canonical_messages([assistant(form)])[0] for form in (first, second))
    assert (one == two) is same


def test_what_does_not_matter_is_gone() -> None:
    plain = {"role": "user", "content": "hi"}
    decorated = {
        "role": "user",
        "content": [{"type": "text", "text": "h", "cache_control": {}}, {"type": "text", "text": "  "}, {"text": "i"}],
        "id": "m1",
        "refusal": None,
        "annotations": [],
    }
    assert canonical_messages([plain]) == canonical_messages([decorated])
    assert canonical_messages([{"role": "developer", "content": "x"}]) == canonical_messages(
        [{"role": "system", "content": "x"}]
    )
    assert canonical_messages([assistant({}, reasoning="r")]) == canonical_messages(
        [assistant({}, reasoning_content="r")]
    )


def test_names_of_users_matter() -> None:
    assert canonical_messages([{"role": "user", "content": "x", "name": "a"}]) != canonical_messages(
        [{"role": "user", "content": "x"}]
    )


def test_a_tool_message_is_the_position_of_the_call_it_answers() -> None:
    calls = [ToolCall("one", "f", {}), ToolCall("two", "g", {})]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    named = canonical_messages(
        [
            said,
            {"role": "tool", "tool_call_id": "two", "content": "b"},
            {"role": "tool", "tool_call_id": "one", "content": "a"},
        ]
    )
    assert [m.answers for m in named[1:]] == [(0, 1), (0, 0)]
    assert [m.call_name for m in named[1:]] == ["g", "f"]
    unnamed = canonical_messages([said, {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}])
    assert [m.answers for m in unnamed[1:]] == [(0, 0), (0, 1)]
    one_too_many = canonical_messages([{"role": "user", "content": "x"}, {"role": "tool", "content": "a"}])
    assert one_too_many[1].answers == (-1, -1)


def test_a_call_with_an_error_is_its_raw_text() -> None:
    broken = ToolCall("i", "f", {}, raw='{"a": ', error="not JSON")
    [message] = canonical_messages([{"role": "assistant", "content": "", "tool_calls": [broken]}])
    assert (message.calls[0].arguments, message.calls[0].value) == ('{"a":', None)


def test_the_order_of_tools_counts_and_the_order_of_keys_does_not() -> None:
    one = ToolSchema("a", "", {"type": "object", "properties": {}})
    same = ToolSchema("a", "", {"properties": {}, "type": "object"})
    other = ToolSchema("b", "")
    assert canonical_tools([one]) == canonical_tools([same])
    assert canonical_tools([one, other]) != canonical_tools([other, one])
    assert canonical_tools(None) == canonical_tools([])


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(SessionError, match="set"):
        canonical_messages([assistant({"a": {1, 2}})])
