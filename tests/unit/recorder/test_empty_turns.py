"""A completion that ended without an id: a turn on record that nothing trains, whatever comes before and after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.chat.model_dirs import renderer_for
from support.gateway.server import serving
from support.rollout.audited import assert_sound
from support.trainer.credited import build, trajectory, turn_advantages
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.recorder.token_session import TokenSession, TrainedBranch
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import Completion, FinishReason, Message

GO: Message = {"role": "user", "content": "Go."}
ON: Message = {"role": "user", "content": "On."}


def empty(finish: FinishReason) -> Completion:
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), finish, ())


def session_of(path: Path, family: str, script: Any, kind: type[Session] = Session) -> tuple[Any, ScriptedClient]:
    renderer = renderer_for(family)
    client = ScriptedClient(renderer, script)
    book = LedgerClient(client, path / "ledger.jsonl")
    return kind(book, renderer, id="s", limits=SessionLimits(context_length=10_000)), client


@pytest.mark.parametrize("family", ["qwen3", "gptoss", "llama3_1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("keeps_turn", [False, True])
async def test_empty_turn_is_closed_by_the_next_context(
    tmp_path: Path, family: str, stream: bool, finish: FinishReason, keeps_turn: bool
) -> None:
    session, client = session_of(tmp_path, family, ["One.", empty(finish), "Two."])
    history = [GO, await session.chat([GO]), ON]
    if stream:
        *_, turn = [item async for item in session.stream(history)]
    else:
        turn = await session.chat(history)
    assert (turn["content"], turn["finish_reason"], turn["turn_id"]) == ("", finish, "t1")
    await session.chat([*history, *([turn] if keeps_turn else []), GO])
    shape = [(segment.kind, len(segment.token_ids) > 0) for segment in session.segments()]
    assert shape == [("context", True), ("sampled", True), ("context", True), ("sampled", False), *shape[:2]]
    assert session.metrics()["forks"] == 0
    # It is closed as a turn is that was cut: what follows the generation prompt is what follows an answer.
    first, second, third = (renderer_for(family).decode(segment.prompt) for segment in client.requests)
    assert third.startswith(second)
    assert third.endswith(first[first.index("Go.") :])
    if family == "qwen3":
        assert third.removeprefix(second) == "<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    trajectory = Trajectory("s", "s", "g", "t", segments=session.segments())
    restored = Trajectory.from_bytes(trajectory.to_bytes())
    assert [bool(segment.weight_versions) for segment in restored.segments if segment.sampled] == [True, False, True]
    assert to_samples(restored).rows[0].trained_tokens == trajectory.sampled_tokens
    report = assert_sound(tmp_path, restored)
    assert report.counts["turns equal to a call"] == 3


async def test_token_session_continues_after_an_empty_turn(tmp_path: Path) -> None:
    session, _ = session_of(tmp_path, "qwen3", ["One.", empty("stop"), "Two."], TokenSession)
    start = [1, 2, 3]
    first = (await session.generate(start)).completion.token_ids.tolist()
    await session.generate([*start, *first, 4])
    third = (await session.generate([*start, *first, 4, 5])).completion.token_ids.tolist()
    response = [*first, 4, 5, *third]
    mask = [1] * len(first) + [0, 0] + [1] * len(third)
    session.train_only([TrainedBranch(start, response, mask)])
    assert session.metrics()["forks"] == 0
    assert all(segment.left_out is None for segment in session.segments())


@pytest.mark.ext
def test_output_for_verl_of_an_empty_turn_has_no_weight_version() -> None:
    from turnwise.ext.frameworks.compat.verl_agent_loop import TokenOutput

    output = TokenOutput([], [], {"role": "assistant", "finish_reason": "length"}, [])
    assert (output.stop_reason, output.extra_fields["global_steps"]) == ("length", -1)


def without_ids(trajectory: Trajectory, turn: int) -> Trajectory:
    at = [segment.index for segment in trajectory.segments if segment.sampled][turn]
    nothing = {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32), "weight_versions": ()}
    segments = [replace(segment, **nothing) if segment.index == at else segment for segment in trajectory.segments]
    return replace(trajectory, segments=segments)


@pytest.mark.parametrize("credit", ["same", "last", "discounted", "turns", "tokens", "gigpo"])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_every_credit_takes_a_turn_without_ids(credit: str, turn: int) -> None:
    gamma = {} if credit in ("same", "last") else {"gamma": 0.5}
    config = {"name": credit, **({"state": "seen"} if credit == "gigpo" else {}), **gamma}
    members = [without_ids(trajectory(name, 3, [(None, reward)]), turn) for name, reward in (("a", 1.0), ("b", 0.0))]
    result = build(members, config)
    assert len(result.rows) == 2
    assert all(row.sample.trained_tokens == 6 for row in result.rows)
    advantages = turn_advantages(result) if credit != "tokens" else {}
    if credit == "last":
        # Of the last turn that holds ids: the reward would teach nothing otherwise.
        assert advantages == {"a": [0.0, 0.5], "b": [0.0, -0.5]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(
    ("route", "ends"),
    [
        ("chat/completions", {"stop": '"finish_reason":"stop"', "length": '"finish_reason":"length"'}),
        ("responses", {"stop": '"status":"completed"', "length": '"status":"incomplete"'}),
        ("messages", {"stop": '"stop_reason":"stop_sequence"', "length": '"stop_reason":"max_tokens"'}),
    ],
)
async def test_every_api_answers_with_an_empty_turn(
    route: str, ends: dict[str, str], finish: FinishReason, stream: bool
) -> None:
    async with serving([empty(finish), "Two."]) as served:
        opened = await served.open()
        history = [GO]
        for _ in range(2):
            key = "input" if route == "responses" else "messages"
            stops = {"stop_sequences": ["END"]} if route == "messages" else {}
            body = {"model": "m", "max_tokens": 50, "stream": stream, key: history, **stops}
            if route == "responses":
                body["max_output_tokens"] = body.pop("max_tokens")
            async with served.http.post(f"{opened['path']}/v1/{route}", json=body) as answer:
                text = await answer.text()
            assert answer.status == 200, text
            if history == [GO]:
                assert ends[finish] in text
                assert "error" not in text.replace('"error":null', "")
            history = [GO, {"role": "assistant", "content": ""}, ON]
        assert [len(segment.token_ids) > 0 for segment in served.session(opened).segments()] == [
            True,
            False,
            True,
            True,
        ]
        assert served.session(opened).metrics()["forks"] == 0
