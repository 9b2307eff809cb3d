"""A live policy serves users over HTTP: dialects, sessions, consent, redaction, feedback and errors by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from support.rollout.record_files import read_records
from support.trainer.live_run import Live, live_config, serving_live
from turnwise.errors import ConfigError
from turnwise.ext.live.learning import check_live
from turnwise.ext.live.sessions import session_digest
from turnwise.recorder.ledger import read_ledgers

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
QUESTION: Any = [{"role": "user", "content": "Colour of sea?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(colour_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    runs = tmp_path_factory.mktemp("live")
    # More sessions than these tests end: they are about serving.
    async with serving_live(live_config(colour_model, runs, batch={"groups": 1000})) as live:
        yield live


def texts_on_disk(live: Live) -> str:
    """Return what the files of a run say in words, and the sessions of its ledgers."""
    files = [file for file in live.directory.rglob("*") if file.suffix in (".jsonl", ".json", ".log", ".yaml")]
    trajectories = [str(record) for record in read_records(live.directory / "trajectories.twz")]
    return "".join([*(file.read_text(errors="replace") for file in files), *trajectories])


async def test_sdks_of_openai_and_anthropic_stream_and_share_a_session(live: Live) -> None:
    headers = {"x-session-id": "dialects", "x-session-consent": "yes"}
    openai = AsyncOpenAI(base_url=f"{live.url}/v1", api_key="user", default_headers=headers)
    stream = await openai.chat.completions.create(model="live", messages=QUESTION, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (await openai.responses.create(model="live", input="Colour of leaf?")).output_text
    anthropic = AsyncAnthropic(base_url=live.url, api_key="user", default_headers=headers)
    async with anthropic.messages.stream(model="live", max_tokens=4, messages=QUESTION) as events:
        assert await events.get_final_text()
    assert await live.rate("dialects", turn=2, score=0.5) is None
    assert await live.rate("dialects", turn=3, score=0.5) == "invalid_value"


async def test_session_is_reached_by_its_address_without_headers(live: Live) -> None:
    status, opened = await live.post("/sessions", {"id": "by-path", "consent": True})
    assert (status, opened["consent"]) == (200, True)
    body = {"model": "live", "messages": QUESTION}
    assert (await live.post(f"{opened['path']}/v1/chat/completions", body, key="any"))[0] == 200
    assert await live.rate("by-path", thumbs="up") is None
    assert await live.finish("by-path") == "finished"
    assert (await live.post(f"{opened['path']}/v1/chat/completions", body))[0] == 404
    assert (await live.post("/sessions", {"id": "by-path"}))[1]["error"]["code"] == "session_exists"


async def test_concurrent_sessions_are_recorded_each_for_itself(live: Live) -> None:
    answers = await asyncio.gather(*(live.ask(f"many-{number}", "sun", x_session_end="yes") for number in range(32)))
    assert all(answers)
    assert [await live.finish(f"many-{number}") for number in (0, 31)] == ["session_ended"] * 2


async def test_session_without_consent_is_served_and_nothing_of_it_is_written(live: Live) -> None:
    ledger_file = live.directory / "ledgers" / "live.jsonl"
    before = texts_on_disk(live), ledger_file.read_bytes()
    assert await live.ask("secret-session", "rose", consent="no")
    assert await live.rate("secret-session", thumbs="up") == "not_consented"
    assert await live.ask("secret-session", "rose", consent="yes") == "consent_differs"
    assert await live.finish("secret-session") == "finished"
    assert (texts_on_disk(live), ledger_file.read_bytes()) == before


async def test_text_is_redacted_before_it_is_written(live: Live) -> None:
    assert await live.ask("redacted", "sun 4711")
    assert await live.rate("redacted", text="call 4711", thumbs="down") is None
    assert await live.finish("redacted") == "finished"
    call = {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"id": "4711"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4711 is here"}
    messages = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"model": "live", "max_tokens": 4, "messages": messages}
    headers = {"x_session_id": "calls", "x_session_consent": "yes", "anthropic_version": "2023-06-01"}
    assert (await live.post("/v1/messages", body, **headers))[0] == 200
    assert await live.finish("calls") == "finished"
    on_disk = texts_on_disk(live)
    assert "#### is here" in on_disk
    assert "sun ####" in on_disk
    assert "call ####" in on_disk
    assert "4711" not in on_disk
    assert '"redacted"' not in on_disk


async def test_failing_redactor_drops_the_session_and_is_counted(live: Live) -> None:
    dropped = (await live.health())["dropped"]
    assert await live.ask("dropped", "sun")
    assert await live.ask("dropped", "fail with a secret") == "redactor_failed"
    assert (await live.health())["dropped"] == dropped + 1
    assert await live.ask("dropped", "sun") == "session_ended"
    assert await live.rate("dropped", thumbs="up") == "nothing_to_learn"
    on_disk = texts_on_disk(live)
    assert "redact_digits raised ValueError" in on_disk
    assert "fail with a secret" not in on_disk


async def test_feedback_is_refused_by_name(live: Live) -> None:
    assert await live.ask("rated", "sun")
    assert await live.rate("unknown", thumbs="up") == "not_found"
    assert (await live.post("/sessions/rated/rewards", {"thumbs": "up"}, key="another"))[0] == 404
    invalid: list[dict[str, Any]] = [
        {}, {"thumbs": "sideways"}, {"thumbs": "up", "score": 1}, {"score": "1"}, {"turn": 1, "score": 1},
        {"turn": -1, "score": 1}, {"stars": 5}, {"score": 1001},
    ]  # fmt: skip
    assert [await live.rate("rated", **feedback) for feedback in invalid] == ["invalid_value"] * len(invalid)
    headers = {"authorization": "Bearer user"}
    for number in ("1e999", "NaN", "Infinity"):
        body = f'{{"score": {number}}}'
        async with live.http.post(f"{live.url}/sessions/rated/rewards", data=body, headers=headers) as answer:
            assert answer.status == 400, number
    assert await live.finish("rated") == "finished"
    assert await live.finish("rated") == "session_ended"
    # Later than its end, and sent again: it counts once.
    assert [await live.rate("rated", id="a", score=2.5) for _ in range(2)] == [None, None]
    assert await live.rate("rated", id="a", score=3) == "invalid_value"
    assert (live.directory / "feedback.jsonl").read_text().count("2.5") == 1


async def test_requests_that_name_no_session_are_refused(live: Live) -> None:
    status, answer = await live.post("/v1/chat/completions", {"model": "live", "messages": QUESTION})
    assert (status, answer["error"]["param"]) == (400, "x-session-id")
    assert await live.ask("s", "sun", consent="perhaps") == "invalid_value"
    assert (await live.post("/s/wrong/v1/chat/completions", {}))[0] == 404
    assert (await live.post("/sessions/s/forget", {}))[0] == 404


async def test_ledger_holds_only_sessions_that_are_recorded(live: Live) -> None:
    consents = {"with-consent": "yes", "without-consent": "no"}
    for name, consent in consents.items():
        assert await live.ask(name, "sun", consent=consent)
        assert await live.finish(name) == "finished"
    sessions = {entry.session for entry in read_ledgers(live.directory).entries}
    recorded = {record["id"] for record in read_records(live.directory / "trajectories.twz")}
    recorded_id, unrecorded = (session_digest("user", name) for name in consents)
    assert f"0-{recorded_id}" in sessions & recorded
    assert not any(unrecorded in name for name in sessions | recorded)
    assert all(name.startswith("0-") for name in sessions | recorded)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"custom": {"live": {"swap": "session"}}}, "custom.live.swap"),
        ({"custom": {"live": {"redact": ["nowhere:redact"]}}}, "custom.live.redact"),
        ({"rollout": {"group_size": 2}}, "rollout.group_size"),
        ({"replay": {"strategy": "bounded"}}, "replay.strategy"),
        ({"mode": "separate_async"}, "mode"),
    ],
    ids=["swap", "redactor", "group", "replay", "mode"],
)
async def test_configuration_that_cannot_learn_from_use_is_refused(
    colour_model: Path, tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        check_live(live_config(colour_model, tmp_path, **changes))
