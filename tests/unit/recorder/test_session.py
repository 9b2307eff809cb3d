"""The recorder on a renderer that is obviously right."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.toy_renderer import CALL, CALL_END, END, ToyRenderer
from support.property_tests import examples
from support.recorder.histories import behave, plans, scripts
from turnwise.errors import BudgetExceeded, InferenceError, SessionError
from turnwise.inference.scripted import ScriptedClient, replay
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import Completion, Message, SamplingParams, StopReason, ToolCall, ToolSchema

TOOL = ToolSchema("look", "Looks.")
OTHER = ToolSchema("other", "Does else.")


def new_session(
    script, *, limits: SessionLimits | None = None, params=None, seed=None, renderer=None, **more
) -> Session:
    renderer = renderer or ToyRenderer()
    client = script if isinstance(script, ScriptedClient) else ScriptedClient(renderer, script)
    return Session(
        client,
        renderer,
        id="s",
        limits=limits or SessionLimits(context_length=10_000),
        params=params,
        seed=seed,
        **more,
    )


def trajectory_of(session: Session) -> Trajectory:
    return Trajectory("s", "e", "g", "t", segments=session.segments())


def call_of(name: str, **arguments) -> ToolCall:
    return ToolCall("mine", name, arguments)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def path_ids(trajectory: Trajectory, index: int) -> list[int]:
    return [i for segment in trajectory.path(index) for i in segment.token_ids.tolist()]


async def test_conversation_is_one_branch_of_the_engines_ids() -> None:
    renderer = ToyRenderer()
    client = ScriptedClient(
        renderer, [{"role": "assistant", "content": "wait", "tool_calls": [call_of("look", at=1)]}, "done"]
    )
    session = new_session(client, renderer=renderer)
    first = await session.chat([user("go")], [TOOL])
    assert first["turn_id"] == "t0"
    assert first["finish_reason"] == "stop"
    [call] = first["tool_calls"]
    assert (call.name, call.arguments) == ("look", {"at": 1})
    answer: Message = {"role": "tool", "tool_call_id": call.id, "content": "seen"}
    await session.chat([user("go"), first, answer], [TOOL])

    trajectory = trajectory_of(session)
    assert [s.kind for s in trajectory.segments] == ["context", "sampled", "context", "sampled"]
    assert trajectory.leaves() == [3]
    for request, sampled in zip(client.requests, (1, 3), strict=True):
        assert path_ids(trajectory, trajectory.segments[sampled].parent) == request.prompt.tolist()
    # The answer is rendered with the id that the session issued.
    assert f"{call.id}=look:seen" in renderer.decode(trajectory.segments[2].token_ids)
    assert not trajectory.forks()


async def test_sampled_ids_stay_if_the_renderer_would_encode_others() -> None:
    renderer = ToyRenderer()
    odd = [CALL, *renderer.text('{ "name" :"look","arguments":{"b":1.0,  "a":2}}'), CALL_END, END]
    session = new_session([odd, "done"], renderer=renderer)
    first = await session.chat([user("go")], [TOOL])
    await session.chat([user("go"), first, {"role": "tool", "content": "x"}], [TOOL])
    trajectory = trajectory_of(session)
    assert trajectory.segments[1].token_ids.tolist() == odd
    assert len(trajectory.leaves()) == 1


async def test_only_new_ids_are_encoded() -> None:
    renderer = ToyRenderer()
    session = new_session(["one", "two", "three"], renderer=renderer)
    messages = [user("x" * 5000)]
    costs = []
    for _ in range(3):
        encoded_before = renderer.encoded
        messages.append(await session.chat(messages))
        costs.append(renderer.encoded - encoded_before)
        messages.append(user("next"))
    assert costs[0] > 5000
    assert costs[1] < 20
    assert costs[2] < 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m[:1], "resample"),
        (lambda m: [user("other")], "restart"),
        (lambda m: [{"role": "system", "content": "s"}, *m], "system_changed"),
        (lambda m: [m[0], {"role": "assistant", "content": "changed"}, *m[2:]], "assistant_edited"),
        (lambda m: [m[0], m[1], user("else"), *m[3:]], None),
        (lambda m: [*m[:2], user("q2, edited"), m[3], m[4]], "history_edited"),
        (lambda m: [*m[:2], user("NOBRIDGE")], "bridge_unproven: no_bridge"),
    ],
)
async def test_history_that_does_not_extend_forks_with_its_reason(change, reason) -> None:
    session = new_session(["a1", "a2", "a3"])
    messages = [user("q1")]
    messages.append(await session.chat(messages))
    messages.append(user("q2"))
    messages.append(await session.chat(messages))
    messages.append(user("q3"))
    await session.chat(change(messages) if reason is not None else messages)
    forks = trajectory_of(session).forks()
    assert forks == ({reason: 1} if reason is not None else {})


async def test_changed_tools_are_another_root_and_key_order_is_not() -> None:
    session = new_session(["a1", "a2", "a3"])
    first = await session.chat(
        [user("q")], [ToolSchema("look", "", {"type": "object", "properties": {"a": {}, "b": {}}})]
    )
    longer = [user("q"), first, user("more")]
    second = await session.chat(longer, [ToolSchema("look", "", {"properties": {"b": {}, "a": {}}, "type": "object"})])
    assert not trajectory_of(session).forks()
    await session.chat([*longer, second, user("!")], [OTHER])
    assert trajectory_of(session).forks() == {"tools_changed": 1}


@pytest.mark.parametrize(("echo", "named", "forks"), [("same", "", 1), ("same", None, 0), ("strict", None, 1)])
async def test_true_and_one_are_different_arguments_without_call_ids(echo, named, forks) -> None:
    script = [{"role": "assistant", "content": "", "tool_calls": [call_of("look", at=1)]}, "x"]
    session = new_session(script, echo=echo)
    first = await session.chat([user("q")], [TOOL])
    answer = {"role": "tool", "content": "y"}
    edited = copy.deepcopy(first)
    call_id = edited["tool_calls"][0].id if named is None else named
    edited["tool_calls"] = [ToolCall(call_id, "look", {"at": True})]
    await session.chat([user("q"), edited, answer], [TOOL])
    assert trajectory_of(session).forks() == ({"assistant_edited": 1} if forks else {})
    assert session.metrics()["rewritten_echoes"] == (forks == 0)


async def test_text_changed_in_place_is_in_the_next_prompt() -> None:
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, ["a1", "a2"])
    session = new_session(client, renderer=renderer)
    messages = [user("first text")]
    messages.append(await session.chat(messages))
    messages[0]["content"] = "changed text"
    messages.append(user("more"))
    await session.chat(messages)
    assert "changed text" in client.requests[1].text
    assert "first text" not in client.requests[1].text


async def test_a_cut_turn_is_closed_by_the_next_context() -> None:
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, ["a long answer", "b"])
    session = new_session(client, renderer=renderer)
    first = await session.chat([user("q")], params=SamplingParams(max_tokens=6))
    assert (first["content"], first["finish_reason"]) == ("a long", "length")
    await session.chat([user("q"), first, user("go on")])
    trajectory = trajectory_of(session)
    assert END not in trajectory.segments[1].token_ids
    assert trajectory.segments[2].token_ids[0] == END
    assert path_ids(trajectory, 2) == client.requests[1].prompt.tolist()


async def test_a_stop_string_cuts_the_text_but_not_the_ids() -> None:
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, ["answer STOP rest", "b"])
    session = new_session(client, renderer=renderer)
    first = await session.chat([user("q")], params=SamplingParams(stop=("STOP",)))
    assert (first["content"], first["finish_reason"]) == ("answer ", "stop")
    await session.chat([user("q"), first, user("go on")])
    trajectory = trajectory_of(session)
    assert renderer.decode(trajectory.segments[1].token_ids) == "answer STOP"
    assert not trajectory.forks()


async def test_seeds_differ_by_turn_and_depend_on_nothing_else() -> None:
    seeds = []
    for _ in range(2):
        renderer = ToyRenderer()
        client = ScriptedClient(renderer, ["a", "b"])
        session = new_session(client, renderer=renderer, seed=7)
        first = await session.chat([user("q")])
        await session.chat([user("q"), first, user("r")])
        seeds.append([request.params.seed for request in client.requests])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


async def test_other_temperature_is_refused_for_training() -> None:
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, ["a", "b"])
    limits, params = SessionLimits(context_length=100), SamplingParams(temperature=0.7)
    session = Session(client, renderer, id="s", limits=limits, params=params, one_temperature=True)
    await session.chat([user("q")], params=SamplingParams(temperature=0.7, max_tokens=5))
    with pytest.raises(SessionError, match=r"params.temperature is 1.0, but this trajectory is trained at 0.7"):
        await session.chat([user("q")], params=SamplingParams(max_tokens=5))
    assert len(client.requests) == 1


async def test_call_ids_are_unique_in_the_session_and_name_their_turn() -> None:
    two = {"role": "assistant", "content": "", "tool_calls": [call_of("look"), call_of("look")]}
    session = new_session([two, two])
    first = await session.chat([user("q")])
    second = await session.chat([user("other")])
    ids = [call.id for message in (first, second) for call in message["tool_calls"]]
    assert len(set(ids)) == 4
    assert [session.turn_of_call(i) for i in ids] == ["t0", "t0", "t1", "t1"]
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert session.turn_of_call("c99999000") is None


class TestLimits:
    async def test_the_least_limit_holds(self) -> None:
        renderer = ToyRenderer()
        client = ScriptedClient(renderer, ["a" * 500] * 3)
        limits = SessionLimits(context_length=100, max_tokens_per_turn=40, max_total_tokens=70)
        session = new_session(client, renderer=renderer, limits=limits)
        await session.chat([user("q")], params=SamplingParams(max_tokens=10))
        await session.chat([user("q")])
        assert [request.params.max_tokens for request in client.requests] == [10, 40]
        # 4 prompt ids once, 10 and 40 sampled ones: 16 of 70 are left.
        await session.chat([user("q")])
        assert client.requests[-1].params.max_tokens == 16
        with pytest.raises(BudgetExceeded) as spent:
            await session.chat([user("q")])
        assert spent.value.stop_reason == StopReason.MAX_TOKENS

    async def test_a_prompt_that_fills_the_context_is_not_sent(self) -> None:
        client = ScriptedClient(ToyRenderer(), ["a"])
        session = new_session(client, limits=SessionLimits(context_length=10))
        with pytest.raises(BudgetExceeded) as spent:
            await session.chat([user("q" * 7)])
        assert spent.value.stop_reason == StopReason.CONTEXT_OVERFLOW
        assert not client.requests

    async def test_turns_are_counted(self) -> None:
        session = new_session(["a"] * 3, limits=SessionLimits(context_length=100, max_turns=2))
        await session.chat([user("q")])
        await session.chat([user("q")])
        with pytest.raises(BudgetExceeded) as spent:
            await session.chat([user("q")])
        assert spent.value.stop_reason == StopReason.MAX_TURNS


def completion(ids, finish="stop", *, spans=None, logprobs=None) -> Completion:
    ids = np.array(ids, np.int32)
    logprobs = np.zeros(len(ids), np.float32) if logprobs is None else logprobs
    return Completion(ids, logprobs, finish, spans if spans is not None else ((0, 0, len(ids)),))


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        (completion([101, 102]), SessionError, "no stop id"),
        (completion([], "length"), SessionError, "do not cover 0 ids"),
        (completion([101, END], logprobs=np.zeros(1, np.float32)), SessionError, "1 logprobs"),
        (completion([101, END], spans=((0, 0, 1),)), SessionError, "do not cover"),
        (completion([101, END], spans=((0, 0, 1), (1, 0, 2))), SessionError, "do not cover"),
        (completion([101], "abort"), InferenceError, "abort"),
        (InferenceError("gone"), InferenceError, "gone"),
    ],
)
async def test_a_client_that_breaks_its_contract_leaves_nothing(line, error, words) -> None:
    session = new_session([line])
    with pytest.raises(error, match=words):
        await session.chat([user("q")])
    assert session.segments() == []


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ([user("q"), {"role": "assistant", "content": "I"}], "prefill"),
        ([{"role": "robot", "content": "q"}], "robot"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    ],
)
async def test_unplaceable_request_is_refused_before_it_is_sent(messages, words) -> None:
    client = ScriptedClient(ToyRenderer(), ["a"])
    with pytest.raises(SessionError, match=words):
        await new_session(client).chat(messages)
    assert not client.requests


async def test_segments_cannot_be_changed() -> None:
    session = new_session(["a"])
    await session.chat([user("q")])
    for segment in session.segments():
        with pytest.raises(ValueError, match="read-only"):
            segment.token_ids[0] = 0


async def test_scripted_conversation_replays_as_one_branch() -> None:
    renderer = ToyRenderer()
    call = {"id": "x1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
    messages = [
        user("q"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x1", "content": "r"},
        {"role": "assistant", "content": "done"},
    ]
    trajectory = await replay(messages, [TOOL], renderer)
    [row] = to_samples(trajectory).rows
    trained = row.input_ids[row.loss_mask]
    assert renderer.decode(trained) == '<4>{"name": "look", "arguments": {"at": 3}}<5><1>done<1>'
    assert not trajectory.forks()


# Properties: whatever an agent does with its history, what is recorded is what the engine saw and sampled.


@settings(max_examples=examples(150), deadline=None)
@given(script=scripts(st.integers(0, 220)), plan=plans(), cut=st.integers(1, 30))
async def test_every_behaviour_is_recorded_exactly(tmp_path_factory, script, plan, cut) -> None:
    renderer = ToyRenderer()
    await behave(renderer, script, plan, cut, tmp_path_factory.mktemp("ledger") / "ledger.jsonl")


async def test_requests_in_flight_together_share_their_context_and_fork_as_concurrent() -> None:
    renderer = ToyRenderer()
    barrier = asyncio.Barrier(2)

    async def script(request):
        await barrier.wait()
        return f"answer {request.number}"

    session = new_session(ScriptedClient(renderer, script), renderer=renderer)
    await asyncio.gather(session.chat([user("q")]), session.chat([user("q")]))
    trajectory = trajectory_of(session)
    assert [(s.kind, s.parent) for s in trajectory.segments] == [("context", -1), ("sampled", 0), ("sampled", 0)]
    assert trajectory.forks() == {"concurrent": 1}


async def test_cancelled_request_records_nothing() -> None:
    renderer = ToyRenderer()
    requested = asyncio.Event()

    async def script(request):
        requested.set()
        if request.number == 0:
            await asyncio.Event().wait()
        return "answer"

    session = new_session(ScriptedClient(renderer, script), renderer=renderer)
    first = asyncio.create_task(session.chat([user("q")]))
    await requested.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await session.chat([user("q")])
    assert len(session.segments()) == 2
    assert not trajectory_of(session).forks()
