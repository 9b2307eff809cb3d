"""What crosses between agents and a hosted endpoint: bytes, headers, secrets, failures, budgets, and what is left."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from rich.console import Console

from support.gateway.hosted_endpoint import KEY, Hosted, Respond, hosting, provider, streamed
from support.gateway.server import ADMIN_HEADERS
from turnwise.errors import AuditError, ConfigError
from turnwise.evaluation.metrics import summarize
from turnwise.evaluation.view import Selection, show
from turnwise.gateway.config import GatewayConfig, GatewayLimits, HostedConfig, base_url
from turnwise.gateway.exchange import Exchange
from turnwise.gateway.proxy.answer import answer_reader
from turnwise.gateway.proxy.redaction import SecretFilter, hide_key
from turnwise.gateway.proxy.session import TextSettings
from turnwise.gateway.server import GatewayProcess
from turnwise.rollout.audit import audit_files
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.trajectory_file import read_trajectories
from turnwise.types import text_of

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
WHOLE = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "Done."}]}
RESPONSE = {
    "id": "resp_1",
    "status": "completed",
    "output": [
        {"type": "message", "id": "msg_a", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
    ],
}
WHOLES = {"chat/completions": WHOLE, "messages": {**MESSAGE, "stop_reason": "end_turn"}, "responses": RESPONSE}


def chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": "c", "choices": [choice]}) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def named(kind: str, **values: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **values}) + b"\n\n"


async def post(
    hosted: Hosted, opened: dict[str, Any], body: Any, route: str = "chat/completions", **headers: str
) -> Any:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    async with hosted.http.post(f"{opened['path']}/v1/{route}", data=data, headers=headers) as answer:
        return answer.status, await answer.read(), answer.headers


def says(*answers: Any) -> Respond:
    """Answers one after the other, the last one for ever: JSON, or a status with JSON and headers."""
    remaining = list(answers)

    async def respond(request: web.Request) -> web.StreamResponse:
        answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        status, body, headers = answer if isinstance(answer, tuple) else (200, answer, {})
        return web.json_response(body, status=status, headers=headers)

    return respond


async def until(holds: Callable[[], Any]) -> None:
    """Wait for something that nobody tells of."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - nobody else knows when
            await asyncio.sleep(0.01)


def texts(trajectory: Trajectory) -> list[str]:
    return [segment.messages[0]["content"] for segment in trajectory.segments if segment.sampled]


# What crosses


async def test_bytes_cross_as_they_are_and_secrets_do_not() -> None:
    answer = (
        b'{ "choices":[{"index":0, "message":{"role":"assistant","content":"D\\u00f6ne."},"finish_reason":"stop"}]}\n'
    )

    async def respond(request: web.Request) -> web.StreamResponse:
        extra = {
            "retry-after": "7",
            "x-ratelimit-remaining-tokens": "5",
            "set-cookie": "a=b",
            "openai-organization": "o",
        }
        return web.Response(body=answer, content_type="application/json", charset="utf-8", headers=extra)

    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        body = (
            b'{"messages": [{"role":"user","content":"Go\\u002e"}],   "model":"m", "logit_bias": {"1": 2}, "zz": 1e3 }'
        )
        sent = {
            "authorization": "Bearer agents-own-key", "x-api-key": "agents-own-key", "cookie": "c=d", "te": "trailers",
            "connection": "keep-alive, x-hop", "x-hop": "1", "x-kept": "yes", "user-agent": "agent/1",
            "x-forwarded-for": "10.0.0.1", "referer": hosted.url + opened["path"], "x-link": opened["token"] + "/",
            "openai-organization": "theirs", "content-type": "application/json",
        }  # fmt: skip
        path = f"{opened['path']}/v1/chat/completions?beta=true&api_key=agents-own-key"
        async with hosted.http.post(path, data=body, headers=sent) as got:
            assert (got.status, await got.read()) == (200, answer)
            assert got.headers["content-type"] == "application/json; charset=utf-8"
            assert (got.headers["retry-after"], got.headers["x-ratelimit-remaining-tokens"]) == ("7", "5")
            assert not {"set-cookie", "openai-organization"} & {name.lower() for name in got.headers}
        [seen] = there.seen
        assert (seen.method, seen.path, seen.body) == ("POST", "/v1/chat/completions?beta=true", body)
        assert seen.headers == {
            "host": there.url.removeprefix("http://"), "authorization": f"Bearer {KEY}", "x-kept": "yes",
            "user-agent": "agent/1", "content-type": "application/json", "accept": "*/*",
            "accept-encoding": "identity", "content-length": str(len(body)),
        }  # fmt: skip
        assert texts(await hosted.finalize(opened)) == ["Döne."]


@pytest.mark.parametrize(
    ("route", "config", "header"),
    [
        ("chat/completions", HostedConfig(), ("authorization", f"Bearer {KEY}")),
        ("responses", HostedConfig(), ("authorization", f"Bearer {KEY}")),
        ("messages", HostedConfig(), ("x-api-key", KEY)),
        ("messages/count_tokens", HostedConfig(), ("x-api-key", KEY)),
        ("messages", HostedConfig(key_header="authorization"), ("authorization", f"Bearer {KEY}")),
        ("chat/completions", HostedConfig(key_header="api-key"), ("api-key", KEY)),
    ],
)
async def test_key_is_sent_in_the_header_of_the_api(route: str, config: HostedConfig, header: tuple[str, str]) -> None:
    async with (
        provider(says(WHOLES.get(route, {"input_tokens": 7}))) as there,
        hosting(there.url, config=config) as hosted,
    ):
        opened = await hosted.open()
        sent = {
            "x-api-key": "theirs",
            "authorization": "Bearer theirs",
            "api-key": "theirs",
            "anthropic-version": "2023-06-01",
        }
        assert (await post(hosted, opened, {**ASK, "input": "Go."}, route, **sent))[0] == 200
        keys = {name: there.seen[0].headers.get(name) for name in ("authorization", "x-api-key", "api-key")}
        assert {name: value for name, value in keys.items() if value is not None} == dict([header])
        assert there.seen[0].path == f"/v1/{route}"
        trajectory = await hosted.finalize(opened)
        assert len(texts(trajectory)) == (0 if "count" in route else 1)


async def test_a_configured_model_is_asked_and_nothing_else_changes() -> None:
    config = HostedConfig(model="big-1", headers={"X-Title": "runs"})
    async with provider(says(WHOLE)) as there, hosting(there.url, config=config, key="") as hosted:
        opened = await hosted.open()
        body = {**ASK, "seed": 2**70, "extra": {"b": 1, "a": [1.5, None]}}
        raw = json.dumps(body).encode()
        assert (await post(hosted, opened, raw))[0] == 200
        assert (await post(hosted, opened, {**ASK, "model": "big-1"}))[0] == 200
        first, second = there.seen
        assert json.loads(first.body) == {**body, "model": "big-1"}
        assert second.body == orjson.dumps({**ASK, "model": "big-1"})
        assert first.headers["x-title"] == "runs"
        assert "authorization" not in first.headers


async def test_models_and_counts_pass_through_and_no_other_route_is_open() -> None:
    async with provider(says({"object": "list", "data": [{"id": "org/m"}]})) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        for path in ("models", "models/org/m.1:free", "models?limit=20"):
            async with hosted.http.get(f"{opened['path']}/v1/{path}") as answer:
                assert (answer.status, (await answer.json())["data"][0]["id"]) == (200, "org/m")
        assert [request.path for request in there.seen] == [
            "/v1/models",
            "/v1/models/org/m.1:free",
            "/v1/models?limit=20",
        ]
        for method, path in (
            ("GET", "models/%2e%2e/files"), ("GET", "models/..%2ffiles"), ("GET", "models/a/%2e%2e/%2e%2e/files"),
            ("GET", "models%2f..%2ffiles"), ("GET", "modelsx"), ("GET", "files"), ("POST", "files"),
            ("GET", "responses/resp_1"), ("DELETE", "models/m"), ("POST", "fine_tuning/jobs"),
            ("GET", "models/a%00b"), ("GET", "models/a%3fb=c"),
        ):  # fmt: skip
            url = aiohttp.client.URL(f"{hosted.url}{opened['path']}/v1/{path}", encoded=True)
            async with hosted.http.request(method, url) as answer:
                assert answer.status == 404, path
        assert len(there.seen) == 3, "nothing of it was asked"


# Streams


STREAMS: dict[str, list[bytes]] = {
    "chat/completions": [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "Hm."}),
        chunk({"content": "Do"}),
        chunk({"content": "ne."}),
        chunk({"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "f", "arguments": ""}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
        chunk({}, "tool_calls"),
        b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":3}}\n\n',
        DONE,
    ],
    "messages": [
        named("message_start", message={"model": "big-1", "usage": {"input_tokens": 6, "cache_read_input_tokens": 4}}),
        named("content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""}),
        named("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "Hm."}),
        named("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "xyz"}),
        named("content_block_stop", index=0),
        named("ping"),
        named("content_block_start", index=1, content_block={"type": "text", "text": ""}),
        named("content_block_delta", index=1, delta={"type": "text_delta", "text": "Done."}),
        named("content_block_stop", index=1),
        named("content_block_start", index=2, content_block={"type": "tool_use", "id": "call_1", "name": "f"}),
        named("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": '{"a": '}),
        named("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": "1}"}),
        named("content_block_stop", index=2),
        named("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 3}),
        named("message_stop"),
    ],
    "responses": [
        named("response.created", response={**RESPONSE, "status": "in_progress", "output": []}),
        named(
            "response.output_item.done", output_index=0,
            item={"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        ),
        named("response.output_text.delta", delta="Done."),
        named("response.output_item.done", output_index=1, item=RESPONSE["output"][0]),
        named(
            "response.output_item.done", output_index=2,
            item={"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'},
        ),
        # Some endpoints send no items at the end again.
        named(
            "response.completed",
            response={"id": "r", "model": "big-1", "usage": {"input_tokens": 10, "output_tokens": 3}},
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic"])
def test_long_lines_and_answers_of_many_pieces_take_linear_time(dialect: str) -> None:
    # An image is a line of many megabytes. Each piece put to the others would take a minute here.
    reader, key_filter = answer_reader(dialect), SecretFilter("abcd")
    began = time.process_time()
    for _ in range(2048):
        key_filter.feed(b"x" * 16_384)
    reader.feed(key_filter.feed(b"\n"))
    if dialect == "openai_chat":
        for _ in range(100_000):
            reader.add_event({"choices": [{"delta": {"content": "abcdefgh"}}]})
        reader.add_event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        assert len(text_of(reader.answers()[0].message)) == 800_000
    assert time.process_time() - began < 5


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("route", STREAMS)
async def test_stream_is_parsed_at_any_chunking(route: str, size: int) -> None:
    raw = b"".join(STREAMS[route]).replace(b"\n", b"\r\n" if size == 7 else b"\n")
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]

    async def respond(request: web.Request) -> web.StreamResponse:
        return await streamed(request, *pieces)

    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        status, got, headers = await post(hosted, opened, {**ASK, "input": "Go.", "stream": True}, route)
        assert (status, got, headers["content-type"]) == (200, raw, "text/event-stream")
        trajectory = await hosted.finalize(opened)
        [_, turn] = trajectory.segments
        function = {"name": "f", "arguments": {"a": 1}}
        assert turn.messages == (
            {
                "role": "assistant",
                "content": "Done.",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            },
        )
        if route != "chat/completions":
            assert trajectory.metrics["answered_by/big-1"] == 1
        used = {name: trajectory.metrics[name] for name in ("prompt_tokens", "completion_tokens")}
        assert used == {"prompt_tokens": 10, "completion_tokens": 3}


async def test_events_go_on_when_they_come_and_the_record_is_there_before_the_end() -> None:
    more = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk({"content": "One "}))
        await more.wait()
        await response.write(chunk({"content": "two."}, "stop") + DONE)
        await response.write_eof()
        return response

    # Signs of life are the endpoint's to send.
    limits = GatewayLimits(alive_seconds=0.02)
    async with provider(respond) as there, hosting(there.url, limits=limits) as hosted:
        opened = await hosted.open()
        async with hosted.http.post(f"{opened['path']}/v1/chat/completions", json={**ASK, "stream": True}) as answer:
            assert await answer.content.readany() == chunk({"content": "One "})
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(answer.content.readany(), 0.1)
            assert hosted.session(opened).turns == 0
            more.set()
            rest = b""
            while not rest.endswith(DONE):
                rest += await answer.content.readany()
            # The agent knows the end now: its next request must find the turn.
            assert hosted.session(opened).turns == 1
        assert rest == chunk({"content": "two."}, "stop") + DONE


@pytest.mark.parametrize("route", STREAMS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_piece_is_sent_when_the_turn_is_on_record(
    route: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return await streamed(request, *STREAMS[route]) if stream else web.json_response(WHOLES[route])

    sent: list[tuple[bytes, int]] = []
    send = Exchange.send

    async def recording_send(self: Exchange, data: bytes, *, final: bool = False) -> None:
        sent.append((data, hosted.session(opened).turns))
        await send(self, data, final=final)

    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        monkeypatch.setattr(Exchange, "send", recording_send)
        assert (await post(hosted, opened, {**ASK, "input": "Go.", "stream": stream}, route))[0] == 200
    end = (b"[DONE]", b"response.completed", b"message_stop") if stream else (b"Done.",)
    ends = [turns for data, turns in sent if any(mark in data for mark in end)]
    assert ends
    assert set(ends) == {1}


async def hangs(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(chunk({"content": "One "}))
    await asyncio.Event().wait()
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


@pytest.mark.parametrize(("respond", "stream"), [(hangs, True), (silent, True), (silent, False)])
async def test_a_client_that_goes_away_ends_the_request_behind(respond: Respond, stream: bool) -> None:
    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        asking = asyncio.ensure_future(post(hosted, opened, {**ASK, "stream": stream}))
        await until(lambda: there.seen)
        asking.cancel()
        await until(there.gone.is_set)
        await until(lambda: not hosted.app.sessions.of_id(opened["id"]).running)
        assert (await hosted.finalize(opened)).segments == []


@pytest.mark.parametrize("respond", [hangs, silent])
async def test_the_end_of_a_session_ends_the_request_behind(respond: Respond) -> None:
    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        asking = asyncio.ensure_future(post(hosted, opened, {**ASK, "stream": True}))
        await until(lambda: there.seen)
        assert (await hosted.finalize(opened)).segments == []
        await until(there.gone.is_set)
        if respond is hangs:
            with pytest.raises(aiohttp.ClientError):
                await asking
        else:
            assert (await asking)[0] == 404


async def test_complete_answer_is_recorded_without_its_end_mark() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk({"content": "All."}, "stop"))
        await asyncio.Event().wait()
        return response

    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        async with hosted.http.post(f"{opened['path']}/v1/chat/completions", json={**ASK, "stream": True}) as answer:
            await answer.content.readany()
        await until(there.gone.is_set)
        await until(lambda: not hosted.app.sessions.of_id(opened["id"]).running)
        assert texts(await hosted.finalize(opened)) == ["All."]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_compressed_all_the_same_is_read(stream: bool) -> None:
    raw = b"".join(STREAMS["chat/completions"]) if stream else orjson.dumps(WHOLE)

    async def respond(request: web.Request) -> web.StreamResponse:
        kind = "text/event-stream" if stream else "application/json"
        response = web.StreamResponse(headers={"content-type": kind})
        response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        await response.write(raw)
        await response.write_eof()
        return response

    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        status, got, headers = await post(hosted, opened, {**ASK, "stream": stream})
        assert (status, got, headers.get("content-encoding")) == (200, raw, None)
        assert texts(await hosted.finalize(opened)) == ["Done."]


# Failures


async def test_a_cut_stream_is_cut_for_the_agent_and_not_recorded() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk({"content": "One "}))
        assert request.transport is not None
        request.transport.close()
        return response

    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(hosted, opened, {**ASK, "stream": True})
        trajectory = await hosted.finalize(opened)
        assert (trajectory.segments, trajectory.stop_reason) == ([], "error")
        assert "broke off an answer" in str(trajectory.error)


FAILURES: list[tuple[int, Any, str, str, bool]] = [
    (500, {"error": {"message": "boom"}}, "error", "answered 500", False),
    (429, {"error": {"message": "slow down"}}, "error", "answered 429", True),
    (404, {"error": {"message": "no such model"}}, "error", "answered 404", False),
    (400, {"error": {"message": "m", "code": "context_length_exceeded"}}, "context_overflow", "", True),
    (400, {"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}, "context_overflow", "", False),
    (400, {"error": {"message": "tools is no list"}}, "completed", "", True),
    (422, {"detail": []}, "completed", "", False),
]


@pytest.mark.parametrize(("status", "body", "reason", "error", "stream"), FAILURES)
async def test_errors_pass_and_say_how_the_session_ended(
    status: int, body: Any, reason: str, error: str, stream: bool
) -> None:
    answers = says((status, body, {"retry-after": "3", "x-should-retry": "false"}), (200, WHOLE, {}))
    async with provider(answers) as there, hosting(there.url, settings=TextSettings(max_turns=1)) as hosted:
        one = await hosted.open(id="one")
        got, raw, headers = await post(hosted, one, {**ASK, "stream": stream})
        assert (got, json.loads(raw), headers["retry-after"], headers["x-should-retry"]) == (status, body, "3", "false")
        trajectory = await hosted.finalize(one)
        assert (trajectory.segments, trajectory.stop_reason) == ([], reason)
        assert error in str(trajectory.error or "")
    async with (
        provider(says((status, body, {}), WHOLE)) as there,
        hosting(there.url, settings=TextSettings(max_turns=1)) as hosted,
    ):
        two = await hosted.open(id="two")
        assert (await post(hosted, two, ASK))[0] == status
        # What failed used up no turn, and is forgotten once the endpoint answers.
        assert (await post(hosted, two, ASK))[0] == 200
        assert (await hosted.finalize(two)).stop_reason == "completed"


@pytest.mark.parametrize(
    ("route", "status", "kind"), [("chat/completions", 503, "server_error"), ("messages", 529, "overloaded_error")]
)
async def test_an_endpoint_that_is_down_is_told_in_the_agents_own_api(route: str, status: int, kind: str) -> None:
    async with provider(says(WHOLE)) as there:
        url = there.url
    async with hosting(url) as hosted:
        opened = await hosted.open()
        got, raw, headers = await post(hosted, opened, ASK, route)
        assert (got, json.loads(raw)["error"]["type"], headers["retry-after"]) == (status, kind, "1")
        trajectory = await hosted.finalize(opened)
        assert (trajectory.stop_reason, trajectory.segments) == ("error", [])
        assert f"the hosted endpoint {base_url(url)} cannot be reached (Connect call failed" in str(trajectory.error)


@pytest.mark.parametrize(
    ("route", "stream", "body"),
    [
        ("chat/completions", False, {"error": {"message": "the provider is overloaded"}}),
        ("chat/completions", True, chunk({"content": "x"}) + chunk({}, "error") + DONE),
        ("chat/completions", True, b'data: {"error":{"message":"overloaded"}}\n\n' + DONE),
        ("responses", False, {**RESPONSE, "status": "failed"}),
        ("responses", True, named("response.failed", response={**RESPONSE, "status": "failed"})),
        ("messages", True, STREAMS["messages"][0] + named("error", error={"type": "overloaded_error"})),
    ],
)
async def test_a_failure_that_looks_like_an_answer_is_none(route: str, stream: bool, body: Any) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return await streamed(request, body) if stream else web.json_response(body)

    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        assert (await post(hosted, opened, {**ASK, "input": "Go.", "stream": stream}, route))[0] == 200
        trajectory = await hosted.finalize(opened)
        assert (trajectory.segments, trajectory.stop_reason) == ([], "error")


async def test_a_redirect_is_not_followed_and_a_refused_key_is_not_quoted() -> None:
    answers = says(
        (307, {}, {"location": "http://127.0.0.1:9/v1"}), (401, {"error": {"message": "Wrong key sk-th***789"}}, {})
    )
    async with provider(answers) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        assert (await post(hosted, opened, ASK))[0] == 502
        status, raw, _ = await post(hosted, opened, ASK)
        assert status == 401
        assert b"sk-th" not in raw
        assert b"refused the gateway's key" in raw
        assert len(there.seen) == 2
        assert (await hosted.finalize(opened)).stop_reason == "error"


async def test_an_answer_that_takes_too_long_is_given_up() -> None:
    limits = GatewayLimits(request_seconds=0.2)
    async with provider(silent) as there, hosting(there.url, limits=limits) as hosted:
        opened = await hosted.open()
        assert (await post(hosted, opened, ASK))[0] == 504
        await until(there.gone.is_set)


async def test_limits_and_keys_hold_in_front_of_an_endpoint() -> None:
    limits = GatewayLimits(body_bytes=500, requests=1)
    async with provider(hangs) as there, hosting(there.url, limits=limits) as hosted:
        opened = await hosted.open()
        assert (await post(hosted, opened, {**ASK, "filler": "x" * 600}))[0] == 413
        assert (await post(hosted, {"path": "/s/" + "x" * 43}, ASK))[0] == 404
        for raw in (b"[1]", b"{", b"\xff"):
            assert (await post(hosted, opened, raw))[0] == 400
        assert not there.seen
        running = asyncio.ensure_future(post(hosted, opened, {**ASK, "stream": True}))
        await until(lambda: there.seen)
        assert (await post(hosted, opened, ASK))[0] == 429
        async with hosted.http.get(f"{opened['path']}/v1/models") as answer:
            assert answer.status == 429, "models are asked with the provider's key too"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with hosted.http.post("/sessions", json={"temperature": 1.0}, headers=ADMIN_HEADERS) as answer:
            assert answer.status == 400
            assert "temperature" in (await answer.json())["error"]["message"]


async def test_budgets_that_need_no_tokens_hold() -> None:
    async with provider(says(WHOLE)) as there, hosting(there.url, settings=TextSettings(max_turns=2)) as hosted:
        opened = await hosted.open(id="turns")
        assert [(await post(hosted, opened, ASK))[0] for _ in range(3)] == [200, 200, 400]
        assert (await hosted.finalize(opened)).stop_reason == "max_turns"
        # A session may have one of its own. 10 tokens are the prompt's, which is sampled behind twice: 10 + 3 + 3.
        session = await hosted.open(id="tokens", max_turns=9, max_total_tokens=16)
        assert [(await post(hosted, session, ASK))[0] for _ in range(3)] == [200, 200, 400]
        trajectory = await hosted.finalize(session)
        assert (trajectory.stop_reason, trajectory.metrics["prompt_tokens"]) == ("max_tokens", 20)
        assert trajectory.metrics["tokens_over_limit"] == 0
        assert len(there.seen) == 4


async def test_the_tokens_of_a_conversation_count_once() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        count = len((await request.json())["messages"])
        return web.json_response({**WHOLE, "usage": {"prompt_tokens": 10 * count, "completion_tokens": 3}})

    async with provider(respond) as there, hosting(there.url, settings=TextSettings(max_total_tokens=34)) as hosted:
        opened = await hosted.open()
        message = {"role": "assistant", "content": "Done."}
        history = [*ASK["messages"], message, {"role": "user", "content": "On."}]
        assert (await post(hosted, opened, ASK))[0] == 200
        # 30 tokens of which 13 are known, and 3 more: 33 in all.
        assert (await post(hosted, opened, {**ASK, "messages": history}))[0] == 200
        assert (await post(hosted, opened, {**ASK, "messages": [*history, message, *ASK["messages"]]}))[0] == 200
        assert (await post(hosted, opened, {**ASK, "messages": history}))[0] == 400
        assert (await hosted.finalize(opened)).metrics["tokens_over_limit"] == 20 - 1


# Secrets


def test_a_key_is_hidden_however_a_stream_is_cut() -> None:
    text = b"x abcabd-secret abcabcabd-secret abc abcabd-secre"
    for size in range(1, len(text)):
        key_filter = SecretFilter("abcabd-secret")
        filtered = b"".join(key_filter.feed(text[at : at + size]) for at in range(0, len(text), size))
        assert filtered + key_filter.end() == b"x [key] abc[key] abc abcabd-secre"
    quiet = SecretFilter("abcabd-secret")
    assert quiet.feed(b"data: {}\n\n") == b"data: {}\n\n", "what is no beginning of a key does not wait"
    assert SecretFilter("").feed(b"abc\n") == b"abc\n"


def text_event(dialect: str, text: str, index: int = 0) -> bytes:
    if dialect == "openai_chat":
        return chunk({"content": text}, index=index)
    if dialect == "anthropic":
        return named("content_block_delta", index=index, delta={"type": "text_delta", "text": text})
    return named("response.output_text.delta", output_index=index, delta=text)


def closing_event(dialect: str, index: int = 0) -> bytes:
    if dialect == "openai_chat":
        return chunk({}, "stop", index)
    if dialect == "anthropic":
        return named("content_block_stop", index=index)
    return named("response.output_text.done", output_index=index, text="")


def texts_of(stream: bytes) -> dict[int, str]:
    texts: dict[int, str] = {}
    for line in stream.splitlines():
        if line.startswith(b"data:"):
            event = orjson.loads(line[5:])
            part = event.get("choices", [event])[0]
            delta = part.get("delta") or {}
            text = delta if isinstance(delta, str) else delta.get("content") or delta.get("text") or ""
            index = part.get("index", part.get("output_index"))
            texts[index] = texts.get(index, "") + text
    return texts


DIALECTS = pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic"])


@DIALECTS
def test_a_key_in_pieces_of_text_is_hidden_and_the_rest_arrives(dialect: str) -> None:
    key = "sk-abcsk-abd/s"
    random = Random(dialect)
    for _ in range(150):
        # Beginnings, whole keys and other words of two texts, which are cut and mixed at random.
        words = [key, key[:5], key[:1], "s ", "x", "\u00e9s", '"', "\\", "[key]"]
        texts = ["".join(random.choices(words, k=random.randrange(8))) for _ in range(2)]
        events, positions = [], [0, 0]
        while unfinished := [index for index in (0, 1) if positions[index] < len(texts[index])]:
            index, size = random.choice(unfinished), random.randrange(1, 1 + random.choice((1, 4, 30)))
            piece = texts[index][positions[index] : positions[index] + size]
            positions[index] += size
            events.append(text_event(dialect, piece, index))
            if random.random() < 0.1:
                events.append(text_event(dialect, "", index))
        events += [closing_event(dialect, index) for index in (0, 1)]
        stream = b"".join(events)
        if random.random() < 0.3:
            stream = stream.replace(b"/", random.choice((b"\\/", b"\\u002f")))
        key_filter, size = SecretFilter(key), random.randrange(1, 200)
        filtered = b"".join(key_filter.feed(stream[at : at + size]) for at in range(0, len(stream), size))
        assert texts_of(filtered) == {index: text.replace(key, "[key]") for index, text in enumerate(texts)}
        assert key_filter.end() == b""
        if not any(key in text for text in texts):
            assert filtered == stream, "events without the key are forwarded byte by byte"


@DIALECTS
def test_a_text_that_ends_like_a_key_begins_waits_for_its_closing_event_only(dialect: str) -> None:
    key_filter = SecretFilter("sk-abc")
    ending, closing, later = text_event(dialect, "yes"), closing_event(dialect), text_event(dialect, "Then", 1)
    assert key_filter.feed(text_event(dialect, "Oh")) == text_event(dialect, "Oh")
    assert key_filter.feed(ending).count(b"yes") == 0
    assert key_filter.feed(later) == b"", "nothing overtakes"
    assert key_filter.feed(closing) == ending.removeprefix(ending.split(b"data:")[0]) + later + closing
    assert key_filter.feed(later) == later


def test_tokens_that_spell_a_hidden_key_are_not_listed_either() -> None:
    pieces = ("My key is ", "sk", "-ab", "c!")
    tokens = [{"token": piece, "logprob": -1.0, "bytes": list(piece.encode()), "top_logprobs": []} for piece in pieces]
    choices = [{"index": 0, "delta": {"content": token["token"]}, "logprobs": {"content": [token]}} for token in tokens]
    events = [b"data: " + orjson.dumps({"choices": [choice]}) + b"\n" for choice in choices]
    key_filter = SecretFilter("sk-abc")
    filtered = [orjson.loads(line[5:]) for line in key_filter.feed(b"".join(events)).splitlines()]
    assert [event["choices"][0]["delta"]["content"] for event in filtered] == [pieces[0], "", "", "[key]!"]
    assert [event["choices"][0]["logprobs"] for event in filtered] == [choices[0]["logprobs"], None, None, None]
    message = {"message": {"content": "".join(pieces)}, "logprobs": {"content": tokens}}
    whole = {"choices": [message, {"message": {"content": "x"}, "output": [{"logprobs": tokens}]}]}
    for mark, end in ((b"", b""), (b"data: ", b"\n")):
        hidden = hide_key(mark + orjson.dumps(whole) + end, "sk-abc")
        assert hidden.startswith(mark)
        assert hidden.endswith(end)
        first, second = orjson.loads(hidden[len(mark) :])["choices"]
        assert (first["logprobs"], second["output"][0]["logprobs"]) == (None, [])
        assert first["message"]["content"] == "My key is [key]!"
        assert hide_key(mark + orjson.dumps(whole) + end, "sk-xyz") == mark + orjson.dumps(whole) + end


def test_reasoning_that_ends_like_a_key_begins_ends_where_content_begins() -> None:
    key_filter = SecretFilter("sk-abc")
    first, second = chunk({"reasoning": "yes", "reasoning_content": "yes"}), chunk({"content": "Done"})
    assert key_filter.feed(first) == b""
    assert key_filter.feed(second) == first + second
    # Each of two fields with one text is joined to itself.
    pieces = [chunk({"reasoning": piece, "reasoning_content": piece}) for piece in ("sk-", "ab", "c!")]
    filtered = key_filter.feed(b"".join(pieces))
    assert filtered.count(b"[key]!") == 2
    assert b"sk-" not in filtered


async def echoing(request: web.Request) -> web.StreamResponse:
    """Quotes all that it was sent, as debugging proxies do."""
    body = json.dumps(dict(request.headers))
    if b'"fail"' in await request.read():
        return web.json_response({"error": {"message": body}}, status=500)
    if b'"stream":true' in await request.read():
        raw = chunk({"content": body}, "stop") + DONE
        return await streamed(request, raw[:150], raw[150:])
    return web.json_response({"choices": [{"message": {"content": body}, "finish_reason": "stop"}]})


async def test_the_process_keeps_the_key_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PROVIDER_KEY", KEY)
    out = tmp_path / "out"
    async with provider(echoing) as there:
        config = GatewayConfig(
            url=there.url, hosted=HostedConfig(key_env="TEST_PROVIDER_KEY"), out=out, port=0, log_level="debug"
        )
        gateway = GatewayProcess(config)
        await gateway.launch()
        try:
            async with aiohttp.ClientSession(gateway.url) as http:
                async with http.post("/sessions", json={"id": "s"}, headers=gateway.admin_headers) as answer:
                    opened = await answer.json()
                for more in ({}, {"stream": True}, {"user": "fail"}, {"stream": True, "user": "fail"}):
                    body = orjson.dumps({**ASK, **more})
                    headers = {"authorization": "Bearer agents-own-key"}
                    async with http.post(f"{opened['path']}/v1/chat/completions", data=body, headers=headers) as answer:
                        raw = await answer.read()
                        assert KEY.encode() not in raw
                        assert b"[key]" in raw
                async with http.get("/sessions/s", headers=gateway.admin_headers) as answer:
                    assert (await answer.json())["turn_ids"] == ["t0", "t1"]
                reward = {"authorization": f"Bearer {opened['reward_key']}"}
                for turn, status in (("t1", 200), ("t2", 400)):
                    body = orjson.dumps({"value": 0.5, "turn_id": turn})
                    async with http.post("/sessions/s/rewards", data=body, headers=reward) as answer:
                        assert answer.status == status
                async with http.post("/sessions/s/finalize", json={}, headers=gateway.admin_headers) as answer:
                    assert (await answer.json())["trajectory"]["recorded"] == "text"
        finally:
            await gateway.close()
        # the check at the start asks for the models, then come the four
        assert [request.headers["authorization"] for request in there.seen] == [f"Bearer {KEY}"] * 5
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"trajectories.twz", "config.yaml", "gateway.log", "admin.key"} <= {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        # An agent's URL stays valid when the gateway is started again: the log of open sessions has it.
        secrets = () if file.name == "sessions.jsonl" else (opened["token"], opened["reward_key"])
        for secret in (KEY, "agents-own-key", *secrets):
            assert secret.encode() not in content, (file, secret)
    assert "TEST_PROVIDER_KEY" in (out / "config.yaml").read_text()
    [trajectory] = read_trajectories(out / "trajectories.twz")
    assert (trajectory.metrics["turns"], trajectory.rewards) == (2, [("t1", "reward", 0.5)])
    with pytest.raises(AuditError, match="1 trajectories, all recorded as text"):
        audit_files(out)
    console = Console(record=True, width=200, file=(tmp_path / "screen").open("w"))
    assert len(show(out, Selection(), tokens=True, console=console)) == 1
    printed = console.export_text()
    assert "recorded as text" in printed
    assert "[key]" in printed
    assert "ids []" not in printed
    summary = summarize([TrajectoryGroup("g", "t", [trajectory])])
    assert (summary.failed, list(summary.rows)) == (1, []), "its last request failed: no figure of the model"


def test_a_configuration_that_cannot_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = HostedConfig()
    with pytest.raises(ValueError, match="no temperature together with hosted"):
        GatewayConfig(url="https://a.test/v1", hosted=hosted, out=tmp_path, temperature=0.5)
    with pytest.raises(ValueError, match="no model together with hosted"):
        GatewayConfig(url="https://a.test/v1", hosted=hosted, out=tmp_path, model=tmp_path)
    with pytest.raises(ValueError, match=r"model\n.*Field required"):
        GatewayConfig(url="https://a.test/v1", out=tmp_path)
    with pytest.raises(ValueError, match=r"model, the directory of a Hugging Face model"):
        GatewayConfig(url="https://a.test/v1", out=tmp_path, model=None)
    for url in (
        None,
        "",
        "a.test",
        "ftp://a.test",
        "https://u:p@a.test",
        "https://a.test/v1?key=1",
        "https://a,https://b",
    ):
        with pytest.raises(ValueError, match="url of one endpoint"):
            GatewayConfig(url=url, hosted=hosted, out=tmp_path)
    with pytest.raises(ValueError, match="key_env"):
        HostedConfig(headers={"Authorization": "Bearer x"})
    for value in (None, "", "short", "with a blank in it"):
        monkeypatch.delenv("SOME_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("SOME_KEY", value)
        problem = "holds no key: one has at least 8 printable characters" if value else "is not set: export it"
        with pytest.raises(ConfigError, match=f"'SOME_KEY', but that environment variable {problem}") as caught:
            HostedConfig(key_env="SOME_KEY").key()
        assert not value or value not in str(caught.value)
    config = GatewayConfig(url="https://a.test", hosted=hosted, out=tmp_path)
    # A process is told its configuration with every key.
    assert GatewayConfig.model_validate(orjson.loads(config.model_dump_json())) == config
    assert base_url(config.url) == "https://a.test/v1"
    assert base_url("https://openrouter.test/api/v1/") == "https://openrouter.test/api/v1"
