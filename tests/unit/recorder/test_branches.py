"""Branching sessions: what is the same turn, where a history forks and why, several requests at a time."""

from __future__ import annotations

import asyncio
import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import ForgetfulRenderer, ToyRenderer
from support.property_tests import examples
from turnwise.errors import InferenceError, RenderError
from turnwise.gateway.local import LocalGateway
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import ModelInfo
from turnwise.recorder.ledger import LedgerClient, read_ledger
from turnwise.recorder.session import PromptPlacement, Session, SessionLimits
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.sessions import EpisodeSessions, Sampler
from turnwise.trainer.algorithms.losses.core import loss_weights
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import Message, SamplingParams, TokenDelta, ToolCall, ToolSchema

TOOL = ToolSchema("look", "Looks.")
LIMITS = SessionLimits(context_length=100_000)
CALLING: Message = {"role": "assistant", "content": "so", "tool_calls": [ToolCall("", "look", {"b": 1.0, "a": "x"})]}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def new(script, renderer=None, **more) -> tuple[Session, ScriptedClient]:
    renderer = renderer or ToyRenderer()
    client = ScriptedClient(renderer, script)
    return Session(client, renderer, id="s", **{"limits": LIMITS, **more}), client


def kept(session: Session) -> Trajectory:
    return Trajectory("s", "e", "g", "t", segments=session.segments())


def parents(session: Session) -> list[int]:
    return [segment.parent for segment in session.segments()]


def plain(message: Message, **changes) -> dict:
    """A message as a program sends it back."""
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for c in message.get("tool_calls", ())
    ]
    return {"role": "assistant", "content": message["content"], "tool_calls": calls, **changes}


# Echo


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from(["", " ", "a", "\n b"]), st.integers(0, 5)), min_size=1, max_size=6
    )
)
async def test_reserialised_history_does_not_fork(turns) -> None:
    script = [
        {
            "role": "assistant",
            "content": text,
            "reasoning_content": "hm",
            "tool_calls": [ToolCall("", "look", {"n": 1.0, "m": [1e20, True], "t": text})] if calls else [],
        }
        for calls, text, _ in turns
    ]
    session, client = new(script)
    history: list = [user("q")]
    for _, text, form in turns:
        turn = await session.chat(history, [TOOL])
        calls = [
            {
                "type": "function",
                "id": call.id if form % 2 else f"mine{len(history)}",
                "function": {
                    "name": "look",
                    "arguments": json.dumps(dict(reversed(call.arguments.items())), indent=form),
                },
            }
            for call in turn.get("tool_calls", ())
        ]
        echo = {
            "role": "assistant",
            "content": [{"type": "text", "text": f" {turn['content']}\n"}],
            "tool_calls": calls,
        }
        if form != 3 or calls or turn["content"].strip():
            history.append(echo)
        history += [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
        history.append(user(text))
    trajectory = kept(session)
    assert len(trajectory.leaves()) == 1
    assert not trajectory.forks()
    path = [i for segment in trajectory.path(trajectory.leaves()[0])[:-1] for i in segment.token_ids.tolist()]
    assert path == client.requests[-1].prompt.tolist()


async def test_call_ids_identify_a_rewritten_turn() -> None:
    session, client = new([CALLING, "done"])
    turn = await session.chat([user("q")], [TOOL])
    [call] = turn["tool_calls"]
    echo = plain(turn, content="", reasoning_content="other")
    echo["tool_calls"][0]["function"]["arguments"] = '{"a": "x", "b": 1, "added": false}'
    await session.chat([user("q"), echo, {"role": "tool", "tool_call_id": call.id, "content": "r"}], [TOOL])
    assert not kept(session).forks()
    assert session.metrics()["rewritten_echoes"] == 1
    assert f"{call.id}=look:r" in client.requests[1].text


async def test_call_ids_select_between_equal_turns() -> None:
    session, _ = new([CALLING, CALLING, "done"])
    first = await session.chat([user("q")], [TOOL])
    await session.chat([user("q")], [TOOL])
    # The second one was committed last, and neither was extended.
    await session.chat([user("q"), plain(first), {"role": "tool", "content": "r"}], [TOOL])
    assert parents(session) == [-1, 0, 0, 1, 3]


async def test_agents_own_call_ids_identify_no_turn() -> None:
    class OwnIds(ToyRenderer):
        def _call(self, raw: str) -> ToolCall:
            call = super()._call(raw)
            return ToolCall("f:0", call.name, call.arguments, raw, call.error)

    shot = {"role": "assistant", "content": "shown", "tool_calls": [ToolCall("f:0", "look", {})]}
    history = [user("q"), shot, {"role": "tool", "tool_call_id": "f:0", "content": "r"}]
    session, client = new([CALLING, "done"], OwnIds())
    turn = await session.chat(history, [TOOL])
    assert turn["tool_calls"][0].id != "f:0"
    await session.chat([*history, turn, {"role": "tool", "content": "s"}], [TOOL])
    assert not kept(session).forks()
    # Ids of calls that were not sampled are made from their position.
    assert "m00000000=look:r" in client.requests[0].text


async def test_equal_call_ids_are_answered_in_order() -> None:
    calls = [ToolCall("x", "one", {}), ToolCall("x", "two", {})]
    history = [user("q"), {"role": "assistant", "content": "", "tool_calls": calls}]
    history += [{"role": "tool", "tool_call_id": "x", "content": "r"}] * 2
    session, client = new(["done"])
    await session.chat(history, [TOOL])
    assert "=one:r" in client.requests[0].text
    assert "=two:r" in client.requests[0].text


async def test_only_sampled_reasoning_may_be_missing() -> None:
    thought: Message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    session, _ = new([thought, "b", "c", "d"])
    await session.chat([user("q")])
    fewshot: Message = {"role": "assistant", "content": " a "}
    turn = await session.chat([user("q"), fewshot, user("r")])
    assert not kept(session).forks()
    shot = [user("q2"), {**thought}, user("r2")]
    await session.chat(shot)
    await session.chat([user("q2"), fewshot, user("r2")])
    assert kept(session).forks() == {"restart": 1, "reasoning_edited": 1}
    assert turn["content"] == "b"


async def test_an_empty_turn_may_be_missing_or_not() -> None:
    empty: Message = {"role": "assistant", "content": " ", "reasoning_content": "hm"}
    session, client = new([CALLING, empty, "b", "c"])
    history: list = [user("q"), await session.chat([user("q")], [TOOL])]
    answer: Message = {"role": "tool", "tool_call_id": history[1]["tool_calls"][0].id, "content": "r"}
    history.append(answer)
    turn = await session.chat(history, [TOOL])
    # Asking again is no extension: there is nothing to go on with.
    await session.chat([*history, user("go on")], [TOOL])
    assert parents(session) == [-1, 0, 1, 2, 3, 4]
    await session.chat([*history, turn, user("go on")], [TOOL])
    assert kept(session).forks() == {"resample": 1}
    assert client.requests[2].prompt.tolist() == client.requests[3].prompt.tolist()


# Edit


async def test_edited_history_is_in_the_next_prompt() -> None:
    session, client = new([CALLING, "told", "x", "y", "z"])
    history: list = [user("question")]
    history.append(copy.deepcopy(await session.chat(history, [TOOL])))
    history.append({"role": "tool", "content": [{"type": "text", "text": "result"}]})
    history += [copy.deepcopy(await session.chat(history, [TOOL])), user("more")]
    for change, seen, reason in (
        (lambda: history[2]["content"][0].update(text="found"), "found", "history_edited"),
        (lambda: history[3].update(content="said"), "said", "assistant_edited"),
        (lambda: history[0].update(content="asked"), "asked", "restart"),
    ):
        change()
        forks_before = kept(session).forks()
        await session.chat(history, [TOOL])
        assert seen in client.requests[-1].text
        assert kept(session).forks() - forks_before == {reason: 1}
    assert "question" not in client.requests[-1].text


# Reasons


async def test_written_messages_of_an_assistant_are_no_shared_turn() -> None:
    session, _ = new(["a", "b"])
    shot: list[Message] = [user("q"), {"role": "assistant", "content": "shown"}]
    await session.chat([*shot, user("r")])
    await session.chat([*shot, user("s")])
    assert kept(session).forks() == {"restart": 1}


async def test_fork_reason_prefers_the_branch_of_the_same_root() -> None:
    session, _ = new(["a", "b", "c", "d"])
    turn = await session.chat([user("q")], [TOOL])
    await session.chat([user("q"), turn, user("r")], [TOOL])
    await session.chat([user("q"), turn, user("r")], [])
    forks_before = kept(session).forks()
    # The branch without tools was used last, but there the turn was not sampled: it would be a restart.
    await session.chat([user("q"), turn, user("s")], [TOOL])
    assert kept(session).forks() - forks_before == {"rewound": 1}


async def test_contexts_that_mean_the_same_with_other_ids_stay_apart() -> None:
    renderer = ToyRenderer()
    barrier = asyncio.Barrier(2)

    async def script(request):
        if request.number < 2:
            await barrier.wait()
        return "a"

    session = Session(ScriptedClient(renderer, script), renderer, id="s", limits=LIMITS)
    shots = [[user("q"), {"role": "assistant", "content": text}, user("r")] for text in ("x", "x ")]
    await asyncio.gather(*(session.chat(shot) for shot in shots))
    assert parents(session) == [-1, 0, -1, 2]
    assert kept(session).forks() == {"concurrent": 1}
    # Who asks again goes on from the one committed last: both mean all the messages.
    await session.chat(shots[0])
    assert parents(session) == [-1, 0, -1, 2, 2]


async def test_under_the_templates_policy_dropped_reasoning_forks_and_is_out_of_the_prompt() -> None:
    thought: Message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    for renderer in (ForgetfulRenderer(), renderer_for("qwen3")):
        for policy, forks in (("keep", {}), ("template", {"reasoning_dropped": 2})):
            script = [thought, {"role": "assistant", "content": "b"}, thought, "d"]
            session, client = new(script, renderer, reasoning=policy)
            history: list[Message] = [user("q")]
            for text in ("r", "s", "t"):
                history += [await session.chat(history), user(text)]
            await session.chat(history)
            assert kept(session).forks() == forks, renderer
            assert client.requests[-1].text.count("hm") == (0 if forks else 2)
            if forks:
                # What the template left out of a root already is not dropped again.
                assert len(kept(session).leaves()) == 3


async def test_template_policy_keeps_reasoning_that_the_template_keeps() -> None:
    calling: Message = {**CALLING, "reasoning_content": "hm"}
    session, client = new([calling, calling, "done"], ForgetfulRenderer(), reasoning="template")
    history: list[Message] = [user("q")]
    for _ in range(2):
        turn = await session.chat(history, [TOOL])
        history += [turn, {"role": "tool", "tool_call_id": turn["tool_calls"][0].id, "content": "r"}]
    await session.chat(history, [TOOL])
    assert not kept(session).forks()
    assert client.requests[-1].text.count("hm") == 2


async def test_a_run_chooses_both_policies() -> None:
    config = RolloutConfig(env=SpecConfig(name="lookup"), reasoning="template", echo="strict")
    renderer = ForgetfulRenderer()
    client = ScriptedClient(renderer, [{**CALLING, "reasoning_content": "hm"}, "b", "c"])
    gateway, info = LocalGateway(renderer, context_length=10_000), ModelInfo("m", 10_000)
    sessions = EpisodeSessions(
        {"main": Sampler(client, renderer, 10_000, gateway, info)}, config,
        episode_id="e", seed=0, temperature=1.0, trained=True,
    )  # fmt: skip
    session = sessions.open("main", "main")
    turn = await session.chat([user("q")], [TOOL])
    await session.chat([user("q"), turn, {"role": "tool", "content": "r"}, user("more")], [TOOL])
    await session.chat([user("q"), {**turn, "content": "other"}, {"role": "tool", "content": "r"}], [TOOL])
    assert kept(session).forks() == {"reasoning_dropped": 1, "assistant_edited": 1}


# Cost, weight and limits


async def test_only_new_ids_are_encoded_whoever_talks_in_turn() -> None:
    renderer = ToyRenderer()
    session, _ = new(lambda request: "y" * 50, renderer)
    agents: list[list] = [[user(f"{name}" * 400)] for name in "ab"]
    costs = []
    for turn in range(6):
        for history in agents:
            encoded_before = renderer.encoded
            answered = await session.chat(history)
            costs.append(renderer.encoded - encoded_before)
            history += [plain(answered), user(f"{turn}")]
    assert max(costs[2:]) <= 51
    assert kept(session).forks() == {"restart": 1}


async def test_trajectory_weight_is_independent_of_branch_count() -> None:
    session, _ = new(["a", "bb", "ccc", "dddd"])
    first = await session.chat([user("q")])
    for text in ("r", "s", "t"):
        await session.chat([user("q"), first, user(text)])
    rows = to_samples(kept(session)).rows
    assert [row.trained_tokens for row in rows] == [2 + 3, 4, 5]
    tokens = [row.trained_tokens for row in rows]
    for mode in ("trajectory_mean", "trajectory_sum", "token_mean"):
        # Beside another trajectory of one branch.
        branched, _ = loss_weights([*tokens, 7], ["one"] * 3 + ["two"], mode)
        alone, _ = loss_weights([sum(tokens), 7], ["one", "two"], mode)
        assert np.dot(branched[:3], tokens) == pytest.approx(alone[0] * sum(tokens))


async def test_filtered_row_leaves_its_turns_to_the_next_row() -> None:
    session, _ = new(["a", "bb", "ccc"])
    first = await session.chat([user("q")])
    for text in ("r", "s"):
        await session.chat([user("q"), first, user(text)])
    samples = to_samples(kept(session), keep=lambda path: path[-1].index != 3)
    assert [row.trained_tokens for row in samples.rows] == [2 + 4]
    assert samples.unowned_tokens == 3


async def test_tokens_over_the_budget_are_counted() -> None:
    barrier = asyncio.Barrier(2)
    renderer = ToyRenderer()

    async def script(request):
        await barrier.wait()
        return "x" * 50

    limits = SessionLimits(context_length=1000, max_total_tokens=60)
    session = Session(ScriptedClient(renderer, script), renderer, id="s", limits=limits)
    await asyncio.gather(session.chat([user("q")]), session.chat([user("q")]))
    assert session.metrics()["tokens_over_limit"] == 4 + 2 * 51 - 60


# Streams


async def test_stream_records_the_same_tree_as_a_request() -> None:
    straight, _ = new([CALLING, "b"])
    streamed, _ = new([CALLING, "b"])
    history: list[Message] = [user("q")]
    for text in ("r", "s"):
        turn = await straight.chat(history, [TOOL])
        seen = [item async for item in streamed.stream(history, [TOOL])]
        assert isinstance(seen[0], PromptPlacement)
        assert all(isinstance(item, TokenDelta) for item in seen[1:-1])
        assert seen[-1] == turn
        history += [turn, user(text)]
    assert seen[0].prompt_tokens - seen[0].known_tokens == len(seen[0].tail)
    assert str(straight.segments()) == str(streamed.segments())


async def test_a_stream_is_recorded_with_its_last_piece_and_not_before() -> None:
    for pieces in (1, 2):
        session, _ = new(["a"])
        stream = session.stream([user("q")])
        for _ in range(1 + pieces):
            await anext(stream)
        await stream.aclose()
        assert len(session.segments()) == (2 if pieces == 2 else 0)


async def test_a_stream_that_is_closed_stops_the_sampling_at_once(tmp_path) -> None:
    """Closed through every layer, not when the collector comes by."""
    sampling = []

    class Held(ScriptedClient):
        async def stream(self, prompt, params, *, session_id):
            sampling.append("begun")
            try:
                async for piece in super().stream(prompt, params, session_id=session_id):
                    yield piece
            finally:
                sampling.append("ended")

    renderer = ToyRenderer()
    client = LedgerClient(Held(renderer, ["a long answer"]), tmp_path / "ledger.jsonl")
    session = Session(client, renderer, id="s", limits=LIMITS)
    stream = session.stream([user("q")])
    for _ in range(3):
        await anext(stream)
    # Whoever else holds it does not keep it going.
    open_stream = stream
    await stream.aclose()
    assert sampling == ["begun", "ended"]
    assert open_stream is stream
    await client.close()
    assert read_ledger(tmp_path / "ledger.jsonl").entries == session.segments() == []


async def test_a_stream_that_fails_leaves_nothing() -> None:
    session, _ = new([InferenceError("gone")])
    with pytest.raises(InferenceError):
        async for _ in session.stream([user("q")], params=SamplingParams()):
            pass
    assert session.segments() == []
    assert str(session.failure) == "gone"


async def test_unrenderable_request_is_not_sent() -> None:
    class Refusing(ToyRenderer):
        def render(self, messages, tools):
            raise RenderError("no")

    session, client = new(["a"], Refusing())
    with pytest.raises(RenderError, match="no"):
        await session.chat([user("q")])
    assert not client.requests
