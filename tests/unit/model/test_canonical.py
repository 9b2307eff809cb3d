"""The canonical form: equal meaning is equal, different meaning is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import SessionError
from turnwise.model.canonical import canonical_arguments, canonical_messages, canonical_tools
from turnwise.recorder.history import History, snapshot
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
def test_equal_canonical_forms(first, second, same) -> None:
    one, two = (canonical_messages([assistant(form)])[0] for form in (first, second))
    assert (one == two) is same


def test_irrelevant_fields_are_dropped() -> None:
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


def test_tool_message_names_the_position_of_its_call() -> None:
    calls = [ToolCall("one", "f", {}), ToolCall("two", "g", {})]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    named = canonical_messages(
        [
            message,
            {"role": "tool", "tool_call_id": "two", "content": "b"},
            {"role": "tool", "tool_call_id": "one", "content": "a"},
        ]
    )
    assert [m.answers for m in named[1:]] == [1, 0]
    assert [m.call_name for m in named[1:]] == ["g", "f"]
    unnamed = canonical_messages([message, {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}])
    assert [m.answers for m in unnamed[1:]] == [0, 1]
    one_too_many = canonical_messages([{"role": "user", "content": "x"}, {"role": "tool", "content": "a"}])
    assert one_too_many[1].answers == -1


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


def test_arguments_outside_json_are_refused() -> None:
    with pytest.raises(SessionError, match="set"):
        canonical_messages([assistant({"a": {1, 2}})])


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.lists(
                st.sampled_from(["user", "answer", "call True", "call 1", "call 1.0", "call 0", "call [1]", "result"]),
                min_size=1,
                max_size=5,
            ),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_cached_reduction_equals_a_full_reduction(steps: list[tuple[int, list[str]]]) -> None:
    values = {"True": True, "1": 1, "1.0": 1.0, "0": 0, "[1]": [1]}
    history = History()
    messages: list[Any] = []
    for kept_count, kinds in steps:
        # The list is edited in place: some messages stay, the others are new.
        del messages[kept_count:]
        for kind in kinds:
            if kind.startswith("call"):
                call = ToolCall(f"c{len(messages)}", "f", {"deep": [{"x": values[kind[5:]]}]})
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif kind == "result":
                messages.append({"role": "tool", "tool_call_id": f"c{len(messages) - 1}", "content": "r"})
            else:
                messages.append({"role": "assistant" if kind == "answer" else "user", "content": kind})
        messages.append({"role": "user", "content": "go on"})
        assert history.reduce(messages) == canonical_messages(messages)


def test_argument_edited_from_one_to_true_is_noticed() -> None:
    call = ToolCall("c0", "f", {"deep": [{"x": 1}], "y": 3})
    messages: list[Any] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "r"},
    ]
    history = History()
    assert history.reduce(messages)[1].calls[0].arguments == '{"deep":[{"x":1}],"y":3}'
    call.arguments["deep"][0]["x"] = True
    assert history.reduce(messages)[1].calls[0].arguments == '{"deep":[{"x":true}],"y":3}'


def test_returned_message_is_recognised_until_it_is_edited() -> None:
    message: Any = {"role": "assistant", "content": "", "tool_calls": [ToolCall("c0", "f", {"x": 1})]}
    form = canonical_messages([message])[0]
    first: list[Any] = [{"role": "user", "content": "go"}]
    result: Any = {"role": "tool", "tool_call_id": "c0", "content": "r"}
    for edited, same in ((1, True), (True, False), (2, False)):
        history = History()
        history.reduce(first)
        history.register_returned(snapshot(message), form)
        echo = {**message, "tool_calls": [ToolCall("c0", "f", {"x": edited})]}
        reduced = history.reduce([*first, echo, result])
        assert (reduced[1] is form) is same
        assert reduced == canonical_messages([*first, echo, result])


@given(json_values)
def test_a_snapshot_is_equal_and_shares_nothing_that_can_be_edited(value: Any) -> None:
    call = ToolCall("c", "f", {"v": value})
    copied = snapshot({"tool_calls": [call], "content": [value]})
    assert copied == {"tool_calls": [call], "content": [value]}
    call.arguments["w"] = 1
    assert "w" not in copied["tool_calls"][0].arguments
