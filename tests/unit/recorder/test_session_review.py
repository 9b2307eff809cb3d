"""The recorder against models, agents and servers that do what they should not."""

from __future__ import annotations

import asyncio
import json
import os
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.chat.toy_renderer import CALL, CALL_END, END, ToyRenderer
from turnwise.append_file import append_whole
from turnwise.errors import FormatError, InferenceError, SessionError
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest, replay
from turnwise.model.canonical import canonical_arguments, canonical_messages
from turnwise.recorder.ledger import LedgerClient, read_ledger
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trajectory import Segment, Trajectory, to_samples
from turnwise.types import Completion, Message, SamplingParams, TokenPrompt, ToolCall, ToolSchema

TOOL = ToolSchema("look", "Looks.")
OTHER = ToolSchema("other", "Does else.")
LIMITS = SessionLimits(context_length=100_000)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


class OwnIds(ToyRenderer):
    """A chat format in which the model writes the ids of its calls itself."""

    def _call(self, raw: str) -> ToolCall:
        call = super()._call(raw)
        return ToolCall(json.loads(raw).get("id", ""), call.name, call.arguments, raw, call.error)


def calls(renderer: ToyRenderer, *bodies: str) -> list[int]:
    return [i for body in bodies for i in (CALL, *renderer.text(body), CALL_END)] + [END]


def session_of(renderer: ToyRenderer, script) -> tuple[Session, ScriptedClient]:
    client = script if isinstance(script, ScriptedClient) else ScriptedClient(renderer, script)
    return Session(client, renderer, id="s", limits=LIMITS), client


def kept(session: Session) -> Trajectory:
    """What is read back from what is written."""
    return Trajectory.from_bytes(Trajectory("s", "e", "g", "t", segments=session.segments()).to_bytes())


# What a model may sample


async def test_numbers_of_more_than_64_bits_are_kept_to_the_last_digit() -> None:
    renderer = ToyRenderer()
    big = 12345678901234567890123
    line = calls(renderer, json.dumps({"name": "look", "arguments": {"x": big, "y": 1e300}}))
    session, _ = session_of(renderer, [line])
    message = await session.chat([user("q")], [TOOL])
    assert message["tool_calls"][0].arguments["x"] == big
    trajectory = kept(session)
    [sampled] = trajectory.segments[1].messages
    assert sampled["tool_calls"][0]["function"]["arguments"] == {"x": big, "y": int(1e300)}
    assert trajectory.segments[0].messages == ({"role": "user", "content": "q"},)
    assert trajectory.segments[0].tools == (TOOL.to_json(),)
    assert trajectory.segments[1].token_ids.tolist() == line


@pytest.mark.parametrize("depth", [99, 100, 300, 5000])
@pytest.mark.parametrize("inner", ["list", "object"])
async def test_arguments_that_are_nested_too_deep_are_an_unusable_call(depth, inner) -> None:
    renderer = ToyRenderer()
    opening, closing = ('{"a":', "}") if inner == "object" else ("[", "]")
    value = opening * depth + "1" + closing * depth
    body = f'{{"name":"look","arguments":{{"x":{value}}}}}'

    class Lenient(ToyRenderer):
        def _call(self, raw: str) -> ToolCall:
            built: object = 1
            for _ in range(depth):
                built = {"a": built} if inner == "object" else [built]
            return ToolCall("", "look", {"x": built}, raw)

    renderer = Lenient()
    session, client = session_of(renderer, [calls(renderer, body), "b"])
    message = await session.chat([user("q")], [TOOL])
    [call] = message["tool_calls"]
    if depth == 99:
        assert call.error is None
    else:
        assert "levels deep" in (call.error or "")
        assert call.arguments == {}
    # The echo extends, and everything can be written and read.
    await session.chat([user("q"), message, {"role": "tool", "tool_call_id": call.id, "content": "no"}], [TOOL])
    assert not kept(session).forks()
    assert len(client.requests) == 2


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", '"\\ud800"', '{"\\udfff": 1}', "[" * 5000])
async def test_an_unusable_call_is_rendered_as_text_that_can_be_kept(text) -> None:
    class Refusing(ToyRenderer):
        def _call(self, raw: str) -> ToolCall:
            return ToolCall("", "look", {}, raw, "no")

    renderer = Refusing()
    session, _ = session_of(renderer, [calls(renderer, text), "b"])
    message = await session.chat([user("q")], [TOOL])
    await session.chat([user("q"), message, {"role": "tool", "content": "no"}], [TOOL])
    trajectory = kept(session)
    [sampled] = trajectory.segments[1].messages
    arguments = sampled["tool_calls"][0]["function"]["arguments"]
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    assert not trajectory.forks()


@given(st.text(st.characters(codec=None), max_size=8), st.recursive(st.none() | st.floats() | st.text(
    st.characters(codec=None), max_size=4) | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(
    st.text(st.characters(codec=None), max_size=3), inner), max_leaves=6))  # fmt: skip
@example("", {"@": None, "\ud800": None})
@example("", {"?": 1, "\ud801": 2})
def test_a_canonical_message_is_always_valid_utf8_json(text, value) -> None:
    raw = json.dumps({"v": value})
    argument_text, parsed = canonical_arguments(raw)
    argument_text.encode()
    if parsed is not None:
        json.dumps(parsed, allow_nan=False, ensure_ascii=False).encode()
        assert canonical_arguments(parsed)[0] == argument_text
    [message] = canonical_messages([{"role": "user", "content": text}])
    message.text.encode()


async def test_half_a_surrogate_pair_from_outside_neither_forks_nor_ends_anything() -> None:
    renderer = ToyRenderer()
    session, client = session_of(renderer, ["a", "b"])
    first = await session.chat([user("x\ud800y")])
    await session.chat([user("x\ud800y"), first, user("more")])
    assert "x?y" in client.requests[0].text
    assert not kept(session).forks()


async def test_call_ids_of_a_model_do_not_collide_with_issued_ids() -> None:
    renderer = OwnIds()
    line = '{"id": "%s", "name": "look", "arguments": {}}'
    plain = '{"name": "look", "arguments": {}}'
    script = [
        calls(renderer, line % "c00001000", line % "same", line % "same", line % "c00000002"),
        calls(renderer, plain, line % "same", plain),
        calls(renderer, line % "c00002000", plain),
    ]
    session, _ = session_of(renderer, script)
    seen: dict[str, str] = {}
    for number in range(3):
        message = await session.chat([user(f"q{number}")], [TOOL])
        for call in message["tool_calls"]:
            assert call.id not in seen
            seen[call.id] = message["turn_id"]
    assert {i: session.turn_of_call(i) for i in seen} == seen
    assert list(seen)[:2] == ["c00001000", "same"]


# What an agent may do


async def test_edits_of_a_returned_message_do_not_reach_the_record() -> None:
    renderer = ToyRenderer()
    session, _ = session_of(renderer, [calls(renderer, '{"name": "look", "arguments": {"x": [1]}}')])
    message = await session.chat([user("q")], [TOOL])
    message["content"] = "edited"
    message["tool_calls"][0].arguments["x"].append(2)
    assert session.last is not None
    assert session.last["content"] == ""
    assert session.last["tool_calls"][0].arguments == {"x": [1]}
    assert kept(session).segments[1].messages[0]["tool_calls"][0]["function"]["arguments"] == {"x": [1]}


async def test_answers_in_another_order_missing_or_twice_name_their_calls() -> None:
    renderer = ToyRenderer()
    body = '{"name": "look", "arguments": {"x": %d}}'
    session, client = session_of(renderer, [calls(renderer, body % 1, body % 2, body % 3), "b", "c"])
    message = await session.chat([user("q")], [TOOL])
    one, two, three = (call.id for call in message["tool_calls"])

    def answer(call_id: str, text: str) -> Message:
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    await session.chat([user("q"), message, answer(three, "III"), answer(one, "I")], [TOOL])
    assert f"{three}=look:III" in client.requests[1].text
    assert f"{one}=look:I<" in client.requests[1].text
    # Without a known id: the first call that has no answer yet. An answer that comes twice stays twice.
    history = [user("q"), message, answer(two, "II"), answer(two, "II"), answer("unknown", "first")]
    await session.chat(history, [TOOL])
    assert client.requests[2].text.count(f"{two}=look:II<") == 2
    assert f"{one}=look:first" in client.requests[2].text
    assert kept(session).forks().total() == 1


async def test_answer_to_no_call_renders_its_canonical_form() -> None:
    renderer = ToyRenderer()
    session, client = session_of(renderer, ["a"] * 3)
    for call_id, name in (("x", "old"), ("y", "old"), ("y", "new")):
        await session.chat([user("q"), {"role": "tool", "tool_call_id": call_id, "name": name, "content": "r"}])
    first, second, third = (request.text for request in client.requests)
    # The id says nothing here; the name is in the prompt, so another name is another prompt.
    assert first == second
    assert "=old:" in first
    assert "=new:" in third
    assert sorted(kept(session).forks()) == ["resample", "restart"]


async def test_unsampled_messages_are_context() -> None:
    renderer = ToyRenderer()
    session, client = session_of(renderer, ["sampled", "more"])
    shot: list[Message] = [user("2+2"), {"role": "assistant", "content": "4"}, user("3+3")]
    first = await session.chat(shot)
    await session.chat([*shot, first, user("and"), {"role": "assistant", "content": "written"}, user("go")])
    trajectory = kept(session)
    assert [s.kind for s in trajectory.segments] == ["context", "sampled", "context", "sampled"]
    [row] = to_samples(trajectory).rows
    assert renderer.decode(row.input_ids[row.loss_mask]) == "sampled<1>more<1>"
    assert row.input_ids.tolist()[: len(client.requests[1].prompt)] == client.requests[1].prompt.tolist()


# Stop strings and stop ids


async def test_the_earliest_of_several_stop_strings_ends_the_text() -> None:
    renderer = ToyRenderer()
    ids = [*renderer.text("one BB two AA")]
    done = Completion(np.array(ids, np.int32), -np.ones(len(ids), np.float32), "stop", ((0, 0, len(ids)),))
    session, _ = session_of(renderer, [done])
    message = await session.chat([user("q")], params=SamplingParams(stop=("AA", "BB")))
    assert (message["content"], message["finish_reason"]) == ("one ", "stop")


async def test_a_stop_id_of_the_request_alone_ends_but_does_not_close_the_turn() -> None:
    renderer = ToyRenderer()
    semicolon = renderer.text(";")[0]
    session, client = session_of(renderer, ["a;b", "c"])
    message = await session.chat([user("q")], params=SamplingParams(stop_token_ids=(semicolon,)))
    assert (message["content"], message["finish_reason"]) == ("a;", "stop")
    assert client.requests[0].params.stop_token_ids == tuple(sorted((END, semicolon)))
    await session.chat([user("q"), message, user("r")])
    trajectory = kept(session)
    assert trajectory.segments[2].token_ids[0] == END
    assert not trajectory.forks()


async def test_a_stop_id_that_the_length_limit_met_is_no_cut() -> None:
    renderer = ToyRenderer()
    ids = np.array([*renderer.text("ok"), END], np.int32)
    done = Completion(ids, -np.ones(3, np.float32), "length", ((0, 0, 3),))
    session, _ = session_of(renderer, [done])
    assert (await session.chat([user("q")]))["finish_reason"] == "stop"


async def test_the_closed_calls_of_a_cut_turn_stand() -> None:
    renderer = ToyRenderer()
    body = '{"name": "look", "arguments": {}}'
    line = [*calls(renderer, body)[:-1], CALL, *renderer.text(body[:9])]
    session, _ = session_of(renderer, [line])
    message = await session.chat([user("q")], [TOOL])
    assert message["finish_reason"] == "length"
    assert [call.error for call in message["tool_calls"]] == [None]


# Servers, cancellation and concurrency


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
async def test_a_logprob_that_is_not_finite_is_refused(value) -> None:
    completion = Completion(np.array([101, END], np.int32), np.array([value, -1], np.float32), "stop", ((0, 0, 2),))
    session, _ = session_of(ToyRenderer(), [completion])
    with pytest.raises(SessionError, match="not finite"):
        await session.chat([user("q")])
    assert session.segments() == []
    assert isinstance(session.failure, SessionError)


async def test_a_failure_is_remembered_until_a_request_succeeds() -> None:
    session, _ = session_of(ToyRenderer(), ["a", InferenceError("gone"), "b"])
    await session.chat([user("q")])
    assert session.failure is None
    with pytest.raises(InferenceError):
        await session.chat([user("r")])
    assert str(session.failure) == "gone"
    await session.chat([user("s")])
    assert session.failure is None


async def test_concurrent_extensions_of_a_turn_fork_there() -> None:
    renderer = ToyRenderer()
    barrier = asyncio.Barrier(2)

    async def script(request):
        if request.number:
            await barrier.wait()
        return f"answer {request.number}"

    session, _ = session_of(renderer, ScriptedClient(renderer, script))
    first = await session.chat([user("q")])
    base = [user("q"), first]
    await asyncio.gather(session.chat([*base, user("left")]), session.chat([*base, user("right")]))
    trajectory = kept(session)
    assert [s.parent for s in trajectory.segments] == [-1, 0, 1, 2, 1, 4]
    assert trajectory.forks() == {"concurrent": 1}
    assert {s.turn_id for s in trajectory.segments if s.sampled} == {"t0", "t1", "t2"}


async def test_scripted_streams_carry_the_version_of_each_token(tmp_path) -> None:
    renderer = ToyRenderer()
    ids = np.array([*renderer.text("abc"), END], np.int32)
    spans = ((3, 0, 1), (4, 1, 4))
    done = Completion(ids, -np.ones(4, np.float32), "stop", spans)
    client = LedgerClient(ScriptedClient(renderer, [done]), tmp_path / "ledger.jsonl")

    async for _ in client.stream(TokenPrompt(np.array([7], np.int32)), SamplingParams(), session_id="s"):
        pass
    await client.close()
    [entry] = read_ledger(tmp_path / "ledger.jsonl").entries
    assert entry.weight_versions == spans


# Files


def test_failed_append_leaves_the_file_unchanged(tmp_path, monkeypatch) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\n")
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    real, room = os.write, 4

    def full(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        written = real(descriptor, data[:room])
        room -= written
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            append_whole(file, b"second\n")
    assert path.read_bytes() == b"first\n"
    append_whole(file, b"third\n")
    os.close(file)
    assert path.read_bytes() == b"first\nthird\n"


@pytest.mark.parametrize("segments", ["[3]", "[[]]", '[{"index":0,"parent":-1,"kind":"context",'
                                      '"token_ids":[4294967296],"messages":[]}]',
                                      '[{"index":0,"parent":-1,"kind":"context","token_ids":[1],'
                                      '"messages":"{"}]', "null"])  # fmt: skip
def test_a_malformed_record_is_a_format_error(segments) -> None:
    text = Trajectory("s", "e", "g", "t").to_bytes().decode()
    with pytest.raises(FormatError, match="'s' is malformed"):
        Trajectory.from_bytes(text.replace('"segments":[]', f'"segments":{segments}'))


def test_a_field_that_json_cannot_express_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="cannot be written"):
        Trajectory("s", "e", "g", "t", metrics={"x": 1 + 2j}).to_bytes()  # type: ignore[dict-item]
    odd = Segment(0, -1, "context", np.zeros(1, np.int32), tools=({"parameters": {1: "one"}},))
    read = Trajectory.from_bytes(Trajectory("s", "e", "g", "t", segments=[odd]).to_bytes())
    assert read.segments[0].tools == ({"parameters": {"1": "one"}},)


def test_a_ledger_id_that_fits_no_array_is_a_format_error(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(
        '{"event":"start","schema_version":1}\n'
        '{"session":"s","shared":0,"token_ids":[4294967296],"completion":[1],"logprobs":[0],"versions":[],'
        '"finish":"stop"}\n'
    )
    with pytest.raises(FormatError, match=r"ledger\.jsonl:2"):
        read_ledger(path)


# Where a request goes on


async def test_after_an_unproven_bridge_the_new_branch_goes_on() -> None:
    renderer = ToyRenderer()
    session, _ = session_of(renderer, ["a", "b", "c", "d", "e"])
    messages: list[Message] = [user("q")]
    costs = []
    for text in ("r", "NOBRIDGE" + "x" * 1000, "s", "t", "u"):
        encoded_before = renderer.encoded
        messages += [await session.chat(messages), user(text)]
        costs.append(renderer.encoded - encoded_before)
    trajectory = kept(session)
    assert trajectory.forks() == {"bridge_unproven: no_bridge": 1}
    # Two branches: one ends where it could not be extended, the other one holds all that came after.
    assert [len(trajectory.path(leaf)) for leaf in trajectory.leaves()] == [4, 6]
    assert costs[2] > 1000
    assert max(costs[3:]) < 10
    assert sum(row.trained_tokens for row in to_samples(trajectory).rows) == trajectory.sampled_tokens


async def test_latest_unextended_turn_of_equal_turns_is_extended() -> None:
    session, _ = session_of(ToyRenderer(), ["same", "same", "b", "c"])
    first = await session.chat([user("q")])
    await session.chat([user("q")])
    await session.chat([user("q"), first, user("r")])
    await session.chat([user("q"), first, user("s")])
    trajectory = kept(session)
    assert [s.parent for s in trajectory.segments] == [-1, 0, 0, 2, 3, 1, 5]
    assert trajectory.forks() == {"resample": 1}


async def test_the_branch_with_most_turns_goes_on() -> None:
    session, client = session_of(ToyRenderer(), ["b", "a", "a2", "c"])
    # A branch whose one turn comes after more messages, and one whose two turns come after fewer.
    written: list[Message] = [user("q"), {"role": "assistant", "content": "a"}, user("r")]
    written += [{"role": "assistant", "content": "a2"}, user("s")]
    await session.chat(written)
    await session.chat([user("q")])
    await session.chat([user("q"), {"role": "assistant", "content": "a"}, user("r")])
    await session.chat([*written, {"role": "assistant", "content": "b"}, user("t")])
    trajectory = kept(session)
    assert trajectory.segments[-1].parent == 6
    assert [s.parent for s in trajectory.segments] == [-1, 0, -1, 2, 3, 4, 5, 6]
    assert len(client.requests) == 4


@pytest.mark.parametrize("named", [None, "compaction"])
async def test_an_agent_may_name_its_fork(named) -> None:
    session, _ = session_of(ToyRenderer(), ["a", "b", "c"])
    first = await session.chat([user("q")], fork=named)
    await session.chat([user("q"), first, user("r")], fork=named)
    await session.chat([user("summary")], fork=named)
    # What makes no fork has no name.
    assert kept(session).forks() == {named or "restart": 1}


async def test_a_sibling_elsewhere_is_not_concurrent_and_a_resample_beside_another_is() -> None:
    renderer = ToyRenderer()
    go, waiting = asyncio.Event(), asyncio.Event()

    async def script(request):
        if "left" in request.text:
            waiting.set()
            await go.wait()
        return "a"

    session, _ = session_of(renderer, ScriptedClient(renderer, script))
    first = await session.chat([user("q")])
    await session.chat([user("q"), first, user("other")])
    pending = asyncio.create_task(session.chat([user("q"), first, user("left")]))
    await waiting.wait()
    await session.chat([user("elsewhere")])
    go.set()
    await pending
    assert kept(session).forks() == {"restart": 1, "rewound": 1}

    barrier = asyncio.Barrier(2)
    number = 0

    async def together(request):
        nonlocal number
        number += 1
        if number > 1:
            await barrier.wait()
        return "a"

    session, client = session_of(renderer, ScriptedClient(renderer, together))
    session = Session(client, renderer, id="s", limits=LIMITS, seed=1)
    await session.chat([user("q")])
    await asyncio.gather(session.chat([user("q")]), session.chat([user("q")]))
    assert kept(session).forks() == {"resample": 1, "concurrent": 1}
    assert len({request.params.seed for request in client.requests}) == 3


async def test_tools_that_are_edited_in_place_or_left_out_by_the_template_are_another_root() -> None:
    class Toolless(ToyRenderer):
        def render(self, messages, tools):
            return super().render(messages, ())

    session, _ = session_of(Toolless(), ["a"] * 4)
    tool = ToolSchema("look", "Looks.", {"type": "object", "properties": {}})
    first = await session.chat([user("q")], [tool])
    messages = [user("q"), first, user("r")]
    tool.parameters["properties"]["x"] = {"type": "string"}
    messages += [await session.chat(messages, [tool]), user("s")]
    await session.chat(messages)
    # Other tools and another conversation: the tools are not why.
    await session.chat([user("new")], [OTHER])
    trajectory = kept(session)
    assert trajectory.forks() == {"tools_changed": 2, "restart": 1}
    assert [s.parent for s in trajectory.segments] == [-1, 0, -1, 2, -1, 4, -1, 6]
    assert [len(s.tools or ()) for s in trajectory.segments if s.parent < 0] == [1, 1, 0, 1]
    # Each root says what was offered then.
    assert ["'x'" in str(s.tools) for s in trajectory.segments if s.parent < 0][:2] == [False, True]


async def test_a_version_span_without_tokens_is_refused() -> None:
    spans = ((1, 0, 0), (2, 0, 2))
    empty = Completion(np.array([101, END], np.int32), -np.ones(2, np.float32), "stop", spans)
    session, _ = session_of(ToyRenderer(), [empty])
    with pytest.raises(SessionError, match="do not cover"):
        await session.chat([user("q")])


async def test_roots_that_differ_in_tools_only_stay_apart_although_their_ids_are_equal() -> None:
    class Toolless(ToyRenderer):
        def render(self, messages, tools):
            return super().render(messages, ())

    renderer = Toolless()
    barrier = asyncio.Barrier(2)

    async def script(request):
        await barrier.wait()
        return "a"

    session, _ = session_of(renderer, ScriptedClient(renderer, script))
    await asyncio.gather(session.chat([user("q")], [TOOL]), session.chat([user("q")], [OTHER]))
    trajectory = kept(session)
    assert [s.parent for s in trajectory.segments] == [-1, 0, -1, 2]
    tools = [segment.tools for segment in trajectory.segments if segment.parent < 0]
    assert sorted(tools, key=str) == [(TOOL.to_json(),), (OTHER.to_json(),)]
    assert trajectory.forks() == {"concurrent": 1}


async def test_a_request_that_ends_within_a_context_is_rewound() -> None:
    renderer = ToyRenderer()
    body = '{"name": "look", "arguments": {}}'
    session, _ = session_of(renderer, [calls(renderer, body, body), "b", "c"])
    first = await session.chat([user("q")], [TOOL])
    answers: list[Message] = [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in first["tool_calls"]]
    await session.chat([user("q"), first, *answers], [TOOL])
    await session.chat([user("q"), first, answers[0]], [TOOL])
    assert kept(session).forks() == {"rewound": 1}


# What is remembered of the last request


def written(*ids: str) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall(i, i, {}) for i in ids]}


async def test_answer_is_reduced_again_after_an_edit_before_it() -> None:
    renderer = ToyRenderer()
    session, client = session_of(renderer, ["a", "b", "c"])
    answer: Message = {"role": "tool", "tool_call_id": "x", "content": "r"}
    for order in (("x", "y"), ("y", "x"), ("x", "y")):
        await session.chat([user("q"), written(*order), answer], [TOOL])
    # In each prompt the answer names x, wherever x stands.
    assert all("=x:r" in request.text for request in client.requests)
    assert client.requests[0].text == client.requests[2].text != client.requests[1].text


async def test_answers_without_ids_begin_again_at_each_message() -> None:
    renderer = ToyRenderer()
    session, client = session_of(renderer, ["a"])
    answer: Message = {"role": "tool", "content": "r"}
    await session.chat([user("q"), written("x"), answer, written("y"), answer], [TOOL])
    assert "=x:r" in client.requests[0].text
    assert "=y:r" in client.requests[0].text


async def test_a_part_that_is_edited_in_place_is_in_the_next_prompt() -> None:
    renderer = ToyRenderer()
    session, client = session_of(renderer, ["a", "b"])
    message: Message = {"role": "user", "content": [{"type": "text", "text": "old"}]}
    await session.chat([message])
    message["content"][0]["text"] = "new"  # type: ignore[index]
    await session.chat([message])
    assert "new" in client.requests[1].text


async def test_a_script_that_ends_at_the_limit_is_not_cut() -> None:
    session, _ = session_of(ToyRenderer(), ["ab"])
    await session.chat([user("q")], params=SamplingParams(max_tokens=3))
    assert session.segments()[1].finish_reason == "stop"


async def test_a_conversation_that_the_format_cannot_say_is_refused() -> None:
    class Thoughtless(ToyRenderer):
        def completion(self, message, tools):
            return super().completion({**message, "reasoning_content": ""}, tools)

    with pytest.raises(SessionError, match="cannot be expressed"):
        await replay([user("q"), {"role": "assistant", "content": "a", "reasoning_content": "hm"}], [], Thoughtless())


async def test_answer_takes_the_current_name_of_its_call() -> None:
    renderer = ToyRenderer()
    session, client = session_of(renderer, ["a", "b"])
    answer: Message = {"role": "tool", "tool_call_id": "x", "content": "r"}
    for name in ("old", "new"):
        caller: Message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("x", name, {})]}
        await session.chat([user("q"), caller, answer], [TOOL])
    assert "=new:r" in client.requests[1].text


async def test_a_clock_that_is_set_changes_no_duration_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, now = ToyRenderer(), time.time()
    monkeypatch.setattr("time.time", lambda: now)

    async def say(request: ScriptedRequest) -> str:
        monkeypatch.setattr("time.time", lambda: now - 7 * 3600)
        return "a"

    started = time.monotonic()
    session, _ = session_of(renderer, ScriptedClient(renderer, say))
    await session.chat([user("q")])
    elapsed = time.monotonic() - started
    [(began, ended)] = session.turn_times.values()
    assert now <= began <= ended <= now + elapsed + 1e-3
