"""Feedback that a live policy's service derives from sessions, and what is refused of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.rollout.record_files import read_records
from support.trainer.judged_run import MODEL, build_judge, judge
from support.trainer.live_run import COLOURS, Live, live_config, serving_live
from support.trainer.lookup_run import shared, silent
from turnwise.errors import ConfigError, FormatError
from turnwise.ext.live.feedback import CORRECTIONS
from turnwise.ext.live.learning import STATE, check_live
from turnwise.ext.live.limits import KeyLimits, key_digest
from turnwise.ext.live.sessions import session_digest
from turnwise.gateway.errors import ApiError
from turnwise.rollout.records import read_batches
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import load_state

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
SOURCES = {
    "next_message": "support.trainer.live_run:score_reply",
    "reward": {
        "colour": {"function": "support.trainer.live_run:score_colour", "weight": 2.0},
        "calls": {"function": "support.trainer.live_run:count_calls", "weight": 10.0},
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(colour_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    runs = tmp_path_factory.mktemp("live")
    (runs / "keys").write_text(f"user\n\n{key_digest('crowd')}\n")
    limits = {"keys": str(runs / "keys"), "requests_per_minute": 300}
    config = live_config(colour_model, runs, batch={"groups": 1000}, custom={"live": SOURCES | limits})
    async with serving_live(config) as live:
        yield live


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that names colours and grades them."""
    return shared(tmp_path_factory, "judge-model", build_judge) / MODEL


async def open_session(live: Live, name: str, task: Any) -> tuple[int, Any]:
    return await live.post("/sessions", {"id": name, "consent": True, "task": task})


def feedback_on(live: Live, name: str) -> list[dict[str, Any]]:
    """Return the lines of feedback.jsonl on a session, its task row among them."""
    lines = (live.directory / "feedback.jsonl").read_text().splitlines()
    digest = session_digest("user", name)
    return [record for line in lines if (record := json.loads(line)).pop("session").endswith(digest)]


async def wait_for_feedback(live: Live, name: str, count: int) -> list[tuple[int | None, float, str]]:
    """Return turn, value and source of a session's derived feedback, when there is so much."""
    while True:
        assert not live.task.done()
        entries = [entry for entry in feedback_on(live, name) if "task" not in entry]
        if len(entries) >= count:
            return [(entry["turn"], entry["value"], entry["source"]) for entry in entries]
        await asyncio.sleep(0.01)


async def test_turns_get_the_scores_of_the_messages_that_follow_them(live: Live) -> None:
    await open_session(live, "replies", {"colour": "none"})
    await live.converse("replies", "Colour of sun?", "wrong", "thanks", "Colour of sea?")
    assert await live.finish("replies") == "finished"
    assert await wait_for_feedback(live, "replies", 3) == [
        (0, -1.0, "next_message"), (1, 1.0, "next_message"), (None, 0.0, "reward"),
    ]  # fmt: skip


async def test_reward_reads_the_task_that_the_client_gave(live: Live) -> None:
    for word, colour in COLOURS.items():
        task = {"prompt": word, "data": {"colour": colour}, "note": "room 4711"}
        assert (await open_session(live, f"task-{word}", task))[0] == 200
        answer = (await live.converse(f"task-{word}", f"Colour of {word}?"))[0]
        assert await live.finish(f"task-{word}") == "finished"
        assert await wait_for_feedback(live, f"task-{word}", 1) == [(None, 2.0 * (answer == colour), "reward")]
        assert feedback_on(live, f"task-{word}")[0]["task"] == {**task, "note": "room ####"}


async def test_reward_reads_calls_with_their_arguments(live: Live) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
    messages = [
        {"role": "user", "content": "Colour of sun?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "yellow"},
    ]
    _, opened = await open_session(live, "calls", {"colour": "none"})
    path = f"{opened['path']}/v1/chat/completions"
    assert (await live.post(path, {"model": "live", "messages": messages}))[0] == 200
    assert await live.finish("calls") == "finished"
    assert await wait_for_feedback(live, "calls", 1) == [(None, 10.0, "reward")]


async def test_frozen_policy_of_the_run_judges_sessions(judge_model: Path, tmp_path: Path) -> None:
    frozen = {"grader": {"model": str(judge_model), "inference": {"threads": 1}}}
    custom = {"live": {"redact": [], "reward": {"liked": judge()}}}
    config = live_config(judge_model, tmp_path, batch={"groups": 1000}, rollout={"frozen": frozen}, custom=custom)
    judged = set()
    async with serving_live(config) as live:
        for number in range(8):
            answer = (await live.converse(f"judged-{number}", f"Name a colour, number {number}."))[0]
            assert await live.finish(f"judged-{number}") == "finished"
            [(turn, score, source)] = await wait_for_feedback(live, f"judged-{number}", 1)
            assert (turn, source) == (None, "reward")
            if answer in ("red", "blue"):  # The judge knows no other.
                assert score == (answer == "red")
                judged.add(answer)
        # What judges read and write quotes users.
        assert not any(b"reward/grader" in file.read_bytes() for file in live.directory.rglob("*") if file.is_file())
    assert judged
    assert audit_run(live.directory, console=silent()).contradictions == []


async def test_failing_function_is_counted_and_the_session_waits_for_its_user(live: Live) -> None:
    before = await live.health()
    # No task, which the reward reads; and the classifier fails.
    await live.converse("failing", "Colour of sun?", "hm")
    assert await live.finish("failing") == "finished"
    while (await live.health())["underived"] < before["underived"] + 2:
        assert not live.task.done()
        await asyncio.sleep(0.01)
    assert feedback_on(live, "failing") == []
    assert await live.rate("failing", thumbs="up") is None
    assert (await live.health())["waiting"] == before["waiting"] + 1


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("sun", "must be an object"),
        ({"env": "tests.nowhere:Env"}, "names code"),
        ({"data": "yellow"}, "data"),
        ({"data": {"colour": "x" * 65_536}}, "65536 bytes"),
    ],
    ids=["type", "code", "data", "size"],
)
async def test_task_is_refused_by_name(live: Live, task: Any, problem: str) -> None:
    status, answer = await open_session(live, "refused", task)
    assert (status, answer["error"]["code"]) == (400, "invalid_value")
    assert problem in answer["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"next_message": "nowhere:score"}, "custom.live.next_message"),
        ({"reward": {"grade": {"function": "judge", "arguments": {"policy": "old"}}}}, "not in rollout.frozen"),
        ({"reward": "judgement"}, "custom.live.reward"),
        ({"keys": "nowhere"}, "custom.live.keys"),
        ({"keys": "/dev/null"}, "names no key"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
    ],
    ids=["classifier", "policy", "reward", "file", "empty", "rate"],
)
async def test_sources_and_limits_that_cannot_be_used_are_refused(
    colour_model: Path, tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        check_live(live_config(colour_model, tmp_path, custom={"live": changes}))


async def test_bucket_of_a_key_refills_within_a_minute() -> None:
    seconds = iter([0.0, 0.0, 0.0, 0.0, 29.0, 30.0, 600.0, 600.0, 600.0])
    limits = KeyLimits(None, 2, lambda: next(seconds))
    limits.admit("a")
    limits.admit("a")
    with pytest.raises(ApiError) as refused:
        limits.admit("a")
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (429, "rate_limited", 30)
    limits.admit("b")
    with pytest.raises(ApiError, match="retry in 1 s"):
        limits.admit("a")
    limits.admit("a")
    limits.admit("a")
    limits.admit("a")
    with pytest.raises(ApiError, match="2 requests a minute"):
        limits.admit("a")


async def test_unknown_key_and_too_many_requests_are_refused_in_both_dialects(live: Live) -> None:
    body = {"model": "live", "messages": []}
    status, answer = await live.post("/v1/chat/completions", body, key="stranger")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    answers: list[tuple[int, Any]] = []
    while 429 not in {status for status, _ in answers}:
        answers += await asyncio.gather(*(live.post("/sessions/none/finish", {}, key="crowd") for _ in range(50)))
    assert {status for status, _ in answers[:300]} == {404}
    assert next(answer for status, answer in answers if status == 429)["error"]["code"] == "rate_limited"
    headers = {"authorization": "Bearer crowd", "anthropic-version": "2023-06-01"}
    while True:
        async with live.http.post(f"{live.url}/v1/messages", json=body, headers=headers) as refused:
            answer = await refused.json()
            if refused.status == 429:
                break
    assert answer["error"]["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"
    assert (await live.post("/sessions/none/finish", {}))[0] == 404


async def test_restart_derives_what_is_missing_and_learns_from_it_once(colour_model: Path, tmp_path: Path) -> None:
    async with serving_live(live_config(colour_model, tmp_path, batch={"groups": 2})) as live:
        for number in range(2):
            await open_session(live, f"s{number}", {"colour": "yellow"})
            await live.ask(f"s{number}", "sun", x_session_end="yes")
    config = live_config(colour_model, tmp_path, batch={"groups": 2}, custom={"live": SOURCES})
    for _ in range(2):
        async with serving_live(config) as live:
            while (await live.health())["learned"] < 2:
                assert not live.task.done()
                await asyncio.sleep(0.01)
    assert [len(feedback_on(live, f"s{number}")) for number in range(2)] == [2, 2]
    assert audit_run(live.directory, console=silent()).contradictions == []


async def test_corrections_teach_without_a_score_and_are_audited(colour_model: Path, tmp_path: Path) -> None:
    self_distill = {"contexts": [CORRECTIONS], "weight": 0.5}
    changes: dict[str, Any] = {"batch": {"groups": 3}, "algorithm": {"self_distill": self_distill}}
    async with serving_live(live_config(colour_model, tmp_path, **changes)) as live:
        for name in ("corrected", "scored", "long"):
            await live.converse(name, "Colour of sun?", "Colour of sea?")
        assert await live.rate("corrected", correction="blue") == "invalid_value"
        assert await live.rate("corrected", turn=2, correction="blue") == "invalid_value"
        for turn, colour in enumerate(("yellow 4711", "blue")):
            assert await live.rate("corrected", turn=turn, id=colour, correction=colour) is None
            assert await live.rate("corrected", turn=turn, id=colour, correction=colour) is None
        assert await live.rate("corrected", turn=1, correction="green") == "correction_exists"
        assert await live.rate("scored", thumbs="up", turn=1, correction="blue") is None
        assert await live.rate("long", turn=0, correction="blue " * 4000) is None
        for name in ("corrected", "scored", "long"):
            assert await live.finish(name) == "finished"
        while (await live.health())["learned"] < 3:
            assert not live.task.done()
            await asyncio.sleep(0.01)
        assert await live.rate("scored", turn=0, correction="yellow") == 1
    metrics = next(record for record in read_records(live.directory / "metrics.jsonl") if record["kind"] == "train")
    assert (metrics["distill/turns"], metrics["distill/too_long"]) == (3, 1)
    contexts = next(iter(read_batches(live.directory / "batches.jsonl").contexts.values()))
    assert sorted(text.partition("\n")[2] for text in contexts.values()) == ["blue", "blue", "yellow ####"]
    # What has no score is no part of a baseline.
    state = load_state(live.directory / "checkpoints" / "step_000001")
    assert state.tasks[STATE]["baselines"] == {"default": [1.0, 1]}
    report = audit_run(live.directory, console=silent())
    assert report.contradictions == []
    assert report.counts["contexts of self-distillation recomputed"] == 3
    feedback = live.directory / "feedback.jsonl"
    feedback.write_text(feedback.read_text().replace("####", "1"))
    assert [
        "context that taught turn 0" in text for text in audit_run(live.directory, console=silent()).contradictions
    ] == [True]
    feedback.write_text(feedback.read_text() + "no feedback\n")
    with pytest.raises(FormatError, match=r"feedback\.jsonl: no feedback"):
        audit_run(live.directory, console=silent())
