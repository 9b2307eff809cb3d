"""Corners of the recorder's rules that generated conversations seldom reach, each told by what it decides."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.model.canonical import Canonical, canonical_messages
from turnwise.recorder.history import History
from turnwise.recorder.matching import same_context
from turnwise.recorder.session import Session, SessionLimits
from turnwise.types import Message, SamplingParams, TokenIds, ToolCall, ToolSchema

TOOL = ToolSchema("look", "Looks.")
OTHER = ToolSchema("seek", "Seeks.")
CALLING: Message = {"role": "assistant", "content": "so", "tool_calls": [ToolCall("", "look", {"a": 1})]}
TWICE: Message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "look", {"n": n}) for n in (1, 2)]}
GO: Message = {"role": "user", "content": "go"}
ON: Message = {"role": "user", "content": "on"}


def session(script: Any, renderer: ToyRenderer | None = None, **limits: Any) -> tuple[Session, ScriptedClient]:
    renderer = renderer or ToyRenderer()
    client = ScriptedClient(renderer, script)
    bounds = SessionLimits(**{"context_length": 10_000, **limits})
    return Session(client, renderer, id="s", limits=bounds), client


def answer(call: ToolCall, text: str = "1") -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def called(name: str, **arguments: Any) -> Any:
    call = {"id": "own", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


async def test_call_ids_select_the_turn_to_extend() -> None:
    recorded, _ = session([CALLING, CALLING, "x", "y"])
    one, two = [await recorded.chat([GO], [TOOL]) for _ in range(2)]
    for turn in (one, two):
        await recorded.chat([GO, turn, answer(turn["tool_calls"][0])], [TOOL])
    first, second = [segment for segment in recorded.segments() if segment.kind == "context" and segment.parent >= 0]
    turns = {segment.turn_id: segment.index for segment in recorded.segments() if segment.turn_id}
    assert (first.parent, second.parent) == (turns[one["turn_id"]], turns[two["turn_id"]])


async def test_equal_messages_are_the_same_context() -> None:
    """Only what was sampled is told apart by its ids; within a context, what is said counts."""
    recorded, client = session([CALLING, CALLING, "x", "y"])
    more: Message = {"role": "user", "content": "NOBRIDGE"}
    for turn in [await recorded.chat([GO], [TOOL]) for _ in range(2)]:
        await recorded.chat([GO, turn, answer(turn["tool_calls"][0]), more], [TOOL])
    assert client.requests[-1].prompt.tolist() == client.requests[-2].prompt.tolist()
    assert recorded.segments()[-1].fork == "resample"


async def test_turn_under_other_tools_is_not_extended() -> None:
    gates = [asyncio.Event() for _ in range(2)]

    async def script(request: ScriptedRequest) -> str:
        if len(client.requests) <= 2:
            await gates[len(client.requests) - 1].wait()
        return "said"

    recorded, client = session(script)
    under_other = asyncio.ensure_future(recorded.chat([GO], [OTHER]))
    await asyncio.sleep(0)
    under_own = asyncio.ensure_future(recorded.chat([GO], [TOOL]))
    for gate, asking in ((gates[1], under_own), (gates[0], under_other)):
        gate.set()
        await asking
    turn = await recorded.chat([GO, await under_own, ON], [TOOL])
    assert turn["turn_id"] == "t2"
    seen = client.requests[-1].prompt.tolist()
    assert seen[: len(client.requests[1].prompt)] == client.requests[1].prompt.tolist()


def test_interrupted_conversation_stays_cached() -> None:
    """A sub-agent that shares the system prompt does not make its parent's history new."""
    reduced: list[Sequence[str]] = []

    def recognise(ids: Sequence[str], message: Canonical) -> None:
        if message.calls:
            reduced.append(ids)

    history = History(recognise)
    system: Message = {"role": "system", "content": "rules"}
    parent = [system, GO, called("look"), answer(ToolCall("own", "look", {}))]
    history.reduce(parent)
    for text in ("one", "two", "three"):
        history.reduce([system, {"role": "user", "content": text}])
    assert len(reduced) == 1
    history.reduce([*parent, ON])
    assert len(reduced) == 1


@pytest.mark.parametrize(("first", "second"), [(False, 0), (0, False), (True, 1), (1.0, True)])
def test_a_switch_that_becomes_a_number_is_an_edit(first: Any, second: Any) -> None:
    history = History()
    original = history.reduce([GO, called("look", a=first), ON])
    edited = history.reduce([GO, called("look", a=second), ON, GO])
    assert original[1] != edited[1]


def test_context_that_is_a_prefix_of_another_is_distinct() -> None:
    one, two = canonical_messages([GO, ON])
    assert same_context([one, two], [one, two])
    assert not same_context([one], [one, two])
    assert not same_context([one, two], [one])


async def test_shorter_history_with_another_result_is_an_edit() -> None:
    recorded, _ = session([CALLING, "a", "b", "c"])
    turn = await recorded.chat([GO], [TOOL])
    history = [GO, turn, answer(turn["tool_calls"][0])]
    second = await recorded.chat(history, [TOOL])
    await recorded.chat([*history, second, ON], [TOOL])
    await recorded.chat([GO, turn, answer(turn["tool_calls"][0], "other")], [TOOL])
    assert recorded.segments()[-2].fork == "history_edited"


@pytest.mark.parametrize(("requested", "expected"), [(None, 7), (3, 3), (9, 7), (7, 7)])
async def test_turn_length_is_the_smaller_limit(requested: int | None, expected: int) -> None:
    recorded, client = session(["x"], max_tokens_per_turn=7)
    await recorded.chat([GO], params=SamplingParams(max_tokens=requested))
    assert client.requests[0].params.max_tokens == expected


async def test_answers_of_a_turn_whose_calls_came_back_in_another_order() -> None:
    recorded, client = session([TWICE, "x"])
    turn = await recorded.chat([GO], [TOOL])
    one, two = turn["tool_calls"]
    echo: Any = {**turn, "tool_calls": [two, one]}
    await recorded.chat([GO, echo, answer(two, "second"), answer(one, "first")], [TOOL])
    text = client.requests[-1].text
    assert f"{one.id}=look:first" in text
    assert f"{two.id}=look:second" in text
    assert recorded.metrics()["branches"] == 1


def test_empty_turn_does_not_separate_call_and_answer() -> None:
    nothing: Message = {"role": "assistant", "content": " "}
    messages = [GO, called("look"), nothing, answer(ToolCall("own", "look", {}))]
    assert canonical_messages(messages)[-1].answers == 0
    # Nor where what stands before it is known already.
    two = called("look")
    two["tool_calls"] = [{**two["tool_calls"][0], "id": f"own{n}"} for n in (0, 1)]
    history_before = [GO, two, answer(ToolCall("own0", "look", {})), nothing, ON]
    history = History()
    history.reduce(history_before)
    longer = history.reduce([*history_before, answer(ToolCall("own1", "look", {}), "late")])
    assert longer[-1].answers == 1
    assert longer == History().reduce([*history_before, answer(ToolCall("own1", "look", {}), "late")])


class Refusing(ToyRenderer):
    """Declines each turn for a reason of its own."""

    def extend(
        self, tail: TokenIds, completion: TokenIds, turn: Canonical, new: Sequence[Canonical], tools: Any
    ) -> TokenIds | None:
        self.why = f"no bridge behind {turn.text}"
        return None


async def test_fork_reason_names_why_the_deepest_turn_was_not_extended() -> None:
    """Not why the ones could not that were tried after it."""
    recorded, _ = session(["a", "b", "c"], Refusing())
    history = [GO]
    for _ in range(3):
        history += [await recorded.chat(history), ON]
    forks = [segment.fork for segment in recorded.segments() if segment.fork and segment.kind == "context"]
    assert forks == [f"bridge_unproven: no bridge behind {text}" for text in "ab"]


async def test_turn_with_a_removed_call_is_another_turn() -> None:
    recorded, _ = session([TWICE, "x"])
    turn = await recorded.chat([GO], [TOOL])
    one, _ = turn["tool_calls"]
    await recorded.chat([GO, {**turn, "tool_calls": [one]}, answer(one)], [TOOL])
    assert recorded.segments()[-2].fork == "assistant_edited"
