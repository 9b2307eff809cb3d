"""The HTTP client against servers that misbehave in every way, real sockets between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from turnwise.errors import DeadlineExceeded, InferenceError, RequestRefused, StructuredOutputError
from turnwise.inference import wire
from turnwise.inference.client import HTTPClient
from turnwise.inference.routing import RoutedRequest, RoutingOptions
from turnwise.model.core import ModelInfo, ServedName
from turnwise.seeding import stable_hash
from turnwise.types import Guide, Media, SamplingParams, TokenPrompt, as_ids, encode_routes

PROMPT = TokenPrompt(as_ids([1, 2, 3]))
PARAMS = SamplingParams(max_tokens=10, seed=4)


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def reply(body: bytes, status: int = 200) -> Answer:
    async def send(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status)

    return send


def answer(ids, reason="stop", version="0", **changes) -> Answer:
    choice = {
        "index": 0,
        "token_ids": list(ids),
        "logprobs": {"content": [{"token_id": token, "logprob": -token / 10, "rank": 1} for token in ids]},
        "finish_reason": reason,
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}] if len(ids) else None,
        **changes,
    }
    return reply(orjson.dumps({"choices": [choice]}))


class Fake:
    """A server that answers from a list, and remembers what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.bodies: list[dict] = []
        self.sessions: list[str | None] = []
        self.connections: set[object] = set()
        self.url = ""
        self.healthy = True
        self.load = b'{"server_load": 3}'
        self.loads_asked = 0
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Fake:
        app = web.Application()
        app.router.add_post(wire.GENERATE, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/load", self._load)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(orjson.loads(await request.read()))
        self.sessions.append(request.headers.get(wire.SESSION_HEADER))
        self.connections.add(request.transport)
        return await self.answers.pop(0)(request)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return await (reply(b"{}") if self.healthy else hang)(request)

    async def _load(self, request: web.Request) -> web.StreamResponse:
        self.loads_asked += 1
        return await reply(self.load)(request)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 77}]})


async def drop(request: web.Request) -> web.StreamResponse:
    request.transport.close()
    return web.Response()


async def drop_half_way(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response


@pytest_asyncio.fixture
async def make():
    clients = []

    def build(*fakes: Fake, **options) -> HTTPClient:
        client = HTTPClient([fake.url for fake in fakes], **{"retry_wait": 0.001, **options})
        clients.append(client)
        return client

    yield build
    for client in clients:
        await client.close()


async def test_request_fields_are_sent_and_the_answer_is_read(make):
    async with Fake(answer([5, 6])) as fake:
        params = SamplingParams(temperature=0.5, max_tokens=7, stop_token_ids=(9,), stop=("x",), seed=3, top_k=2)
        done = await make(fake, model="lora").generate(PROMPT, params, session_id="s1")
    assert done.token_ids.tolist() == [5, 6]
    assert done.token_ids.dtype == np.int32
    assert np.allclose(done.logprobs, [-0.5, -0.6])
    assert (done.finish_reason, done.weight_versions) == ("stop", ((0, 0, 2),))
    assert fake.sessions == ["s1"]
    assert fake.bodies == [
        {
            "token_ids": [1, 2, 3],
            "model": "lora",
            "sampling_params": {
                "temperature": 0.5,
                "logprobs": 0,
                "max_tokens": 7,
                "top_k": 2,
                "seed": 3,
                "stop": ["x"],
                "skip_special_tokens": False,
                "stop_token_ids": [9],
            },
        }
    ]


async def test_partial_answers_are_continued_and_merged(make):
    answers = [
        answer([5, 6], "abort", "1"),
        answer([], "abort"),
        answer([7], "abort", "1"),
        answer([8, 9], "stop", "2"),
    ]
    async with Fake(*answers) as fake:
        done = await make(fake).generate(PROMPT, PARAMS, session_id="s")
    assert done.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert np.allclose(done.logprobs, [-0.5, -0.6, -0.7, -0.8, -0.9])
    assert done.weight_versions == ((1, 0, 3), (2, 3, 5))
    assert done.finish_reason == "stop"
    assert [body["token_ids"] for body in fake.bodies] == [[1, 2, 3], *[[1, 2, 3, 5, 6]] * 2, [1, 2, 3, 5, 6, 7]]
    assert [body["sampling_params"]["max_tokens"] for body in fake.bodies] == [10, 8, 8, 7]
    # A server whose numbers are keyed by position takes the first; another gets new ones for each part.
    assert [body.get("seed") for body in fake.bodies] == [None, 4, 4, 4]
    first, *later_seeds = [body["sampling_params"]["seed"] for body in fake.bodies]
    assert first == 4
    assert later_seeds == [stable_hash(4, 2), stable_hash(4, 2), stable_hash(4, 3)]
    assert [body.get("continued") for body in fake.bodies] == [None, 2, 2, 3]


async def test_completions_of_an_adapter_have_its_weight_version(make):
    names = iter([ServedName("solver@1", 4), ServedName("solver@2", 5), ServedName("solver@2", 5)])
    # Of its own model's weights, the server says something else.
    async with Fake(answer([5, 6], "abort", "0"), answer([7], "abort", "0"), answer([8, 9], "stop", "0")) as fake:
        done = await make(fake, names=lambda url: next(names)).generate(PROMPT, PARAMS, session_id="s")
    assert [body["model"] for body in fake.bodies] == ["solver@1", "solver@2", "solver@2"]
    assert done.weight_versions == ((4, 0, 2), (5, 2, 5))
    script = events(piece([5, 6]), piece([7], "stop"), b"[DONE]")
    async with Fake(script) as fake:
        deltas = await collect(make(fake, names=lambda url: ServedName("solver@3", 6)))
    assert [delta.weight_version for delta in deltas] == [6, 6]
    assert deltas[-1].weight_versions == ((6, 0, 3),)


async def test_an_abort_after_the_last_token_is_an_end(make):
    async with Fake(answer(range(10), "abort")) as fake:
        done = await make(fake).generate(PROMPT, PARAMS, session_id="s")
    assert (len(done.token_ids), done.finish_reason) == (10, "length")


async def test_a_server_that_only_aborts_is_a_failure(make, monkeypatch):
    monkeypatch.setattr("turnwise.inference.client._ABORT_WAIT", 0.0)
    async with Fake(*[answer([], "abort")] * 200) as fake:
        with pytest.raises(InferenceError, match="aborted a request 100 times in a row"):
            await make(fake).generate(PROMPT, PARAMS, session_id="s")
    assert len(fake.bodies) == 100


async def test_broken_connections_are_tried_again(make):
    async with Fake(drop, drop_half_way, answer([5])) as fake:
        done = await make(fake, retries=2).generate(PROMPT, PARAMS, session_id="s")
    assert done.token_ids.tolist() == [5]
    assert len(fake.bodies) == 3
    assert fake.bodies[0] == fake.bodies[2]


async def test_tries_are_bounded(make):
    async with Fake(*[drop] * 9) as fake:
        with pytest.raises(InferenceError, match=r"cannot be reached after 3 tries") as caught:
            await make(fake, retries=2).generate(PROMPT, PARAMS, session_id="s")
    assert caught.value.retryable
    assert len(fake.bodies) == 3


async def test_another_server_takes_over_and_keeps_the_session(make):
    async with Fake(drop) as broken, Fake(answer([5]), answer([6])) as intact:
        client = make(broken, intact)
        first = await client.generate(PROMPT, PARAMS, session_id="s")
        second = await client.generate(PROMPT, PARAMS, session_id="s")
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([5], [6])
    assert (len(broken.bodies), len(intact.bodies)) == (1, 2)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestRefused),
        (403, RequestRefused),
        (404, RequestRefused),
        (429, InferenceError),
        (500, InferenceError),
        (503, InferenceError),
    ],
)
async def test_refusals_and_failures(make, status, kind):
    async with Fake(reply(wire.encode_error("because", status=status), status)) as fake:
        with pytest.raises(InferenceError, match=f"answered {status}: because") as caught:
            await make(fake).generate(PROMPT, PARAMS, session_id="s")
    assert type(caught.value) is kind
    assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (reply(b"<html>"), "not JSON"),
        (answer([5], logprobs=None), "1 ids with 0 log-probabilities"),
        (answer([5], weight_versions=[{"version": "0", "start": 0, "end": 2}]), "weight versions for"),
        (answer([5], "error"), "finish_reason 'error'"),
    ],
)
async def test_answers_that_cannot_be_used(make, script, message):
    async with Fake(script) as fake:
        with pytest.raises(InferenceError, match=message):
            await make(fake).generate(PROMPT, PARAMS, session_id="s")


async def test_a_cancelled_call_closes_its_connection(make):
    gone, there = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        there.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    async with Fake(hang) as fake:
        call = asyncio.create_task(make(fake).generate(PROMPT, PARAMS, session_id="s"))
        await there.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # The server notices the closed connection and cancels its handler.
        await asyncio.wait_for(gone.wait(), 10)


async def test_connections_are_pooled(make):
    async with Fake(*[answer([5])] * 20) as fake:
        client = make(fake)
        for _ in range(20):
            await client.generate(PROMPT, PARAMS, session_id="s")
        assert len(fake.connections) == 1


async def test_media_and_endless_seeds_are_refused_before_anything_is_sent(make):
    async with Fake() as fake:
        with pytest.raises(RequestRefused, match="1 media"):
            await make(fake).generate(
                TokenPrompt(PROMPT.token_ids, (Media("image", b"", 0, 1),)), PARAMS, session_id="s"
            )
        with pytest.raises(RequestRefused, match="more than 64 bits"):
            await make(fake).generate(PROMPT, SamplingParams(seed=2**63), session_id="s")
        assert not fake.bodies


@pytest.mark.parametrize(
    ("truncation", "cause"),
    [
        ({"top_p": 0.9}, "top_p, top_k or min_p"),
        ({"top_k": 20}, "top_p, top_k or min_p"),
        ({"guide": Guide(tag="{}")}, "a grammar"),
    ],
)
async def test_truncated_sampling_without_masks_is_refused_with_what_to_set(make, truncation, cause):
    params = replace(PARAMS, temperature=1.0, sampling_mask=True, **truncation)
    async with Fake(answer([5]), answer([5])) as fake:
        with pytest.raises(
            InferenceError, match=f"no sampling masks, where {cause}.* set rollout.sampling_mask to full"
        ):
            await make(fake).generate(PROMPT, params, session_id="s")
        assert fake.bodies[0]["sampling_mask"] is True
        await make(fake).generate(PROMPT, replace(params, sampling_mask=False), session_id="s")
        assert "sampling_mask" not in fake.bodies[1]


async def test_a_closed_client_says_so(make):
    async with Fake(answer([5])) as fake:
        client = make(fake)
        await client.generate(PROMPT, PARAMS, session_id="s")
        await client.close()
        await client.close()
        with pytest.raises(InferenceError, match="closed"):
            await client.generate(PROMPT, PARAMS, session_id="s")


async def test_model_info_of_a_server_without_versions(make):
    async with Fake() as fake:
        assert await make(fake).model_info() == ModelInfo("m", 77, 0)


# -- streams


def events(*parts: object, broken: bool = False) -> Answer:
    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": a comment\n\n")
        for part in parts:
            data = part if isinstance(part, bytes) else orjson.dumps(part)
            await response.write(b"data: " + data + b"\n\n")
        if broken:
            request.transport.close()
        return response

    return send


def piece(ids, reason=None, **changes) -> dict:
    content = [{"token_id": token, "logprob": -token / 10} for token in ids]
    return {"choices": [{"token_ids": list(ids), "logprobs": {"content": content}, "finish_reason": reason, **changes}]}


async def collect(client: HTTPClient, params: SamplingParams = PARAMS) -> list:
    return [delta async for delta in client.stream(PROMPT, params, session_id="s")]


async def test_a_stream_of_vllm(make):
    spans = [{"version": "default", "start": 0, "end": 3}]
    script = events(piece([5, 6]), piece([7], "stop", weight_versions=spans), {"choices": [], "usage": {}}, b"[DONE]")
    async with Fake(script) as fake:
        deltas = await collect(make(fake))
    assert [delta.token_ids.tolist() for delta in deltas] == [[5, 6], [7]]
    assert [delta.finish_reason for delta in deltas] == [None, "stop"]
    # It says at the end which weights sampled what.
    assert [delta.weight_version for delta in deltas] == [None, 0]
    assert [delta.weight_versions for delta in deltas] == [(), ((0, 0, 3),)]
    assert fake.bodies[0]["stream"] is True


async def test_streams_and_requests_use_a_connection_again(make):
    spans = [{"version": "0", "start": 0, "end": 1}]
    complete = events(piece([5], "stop", weight_versions=spans), {"choices": [], "usage": {}}, b"[DONE]")
    async with Fake(complete, complete, answer([6])) as fake:
        client = make(fake)
        await collect(client)
        await collect(client)
        await client.generate(PROMPT, PARAMS, session_id="s")
    assert len(fake.connections) == 1


async def test_a_stream_goes_on_after_aborts_and_breaks(make):
    def spans(version, end):
        return [{"version": version, "start": 0, "end": end}]

    scripts = [
        events(piece([5], weight_versions=spans("1", 1)), piece([6], "abort", weight_versions=spans("1", 2))),
        events(piece([7], weight_versions=spans("2", 1)), broken=True),
        events(piece([], "abort")),
        events(piece([8], "stop", weight_versions=spans("2", 1)), b"[DONE]"),
    ]
    async with Fake(*scripts) as fake:
        deltas = await collect(make(fake))
    assert [token for delta in deltas for token in delta.token_ids.tolist()] == [5, 6, 7, 8]
    assert [delta.weight_version for delta in deltas] == [1, 1, 2, 2]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]
    assert [delta.weight_versions for delta in deltas] == [(), (), (), ((1, 0, 2), (2, 2, 4))]
    assert [body["token_ids"][3:] for body in fake.bodies] == [[], [5, 6], [5, 6, 7], [5, 6, 7]]
    assert [body["sampling_params"]["max_tokens"] for body in fake.bodies] == [10, 8, 7, 7]


async def test_a_stream_goes_to_another_server_when_its_own_breaks(make):
    complete = events(piece([5], "stop", weight_versions=[{"version": "0", "start": 0, "end": 1}]))
    async with Fake(drop) as broken, Fake(complete) as other:
        deltas = await collect(make(broken, other))
    assert [delta.token_ids.tolist() for delta in deltas] == [[5]]
    assert (len(broken.bodies), len(other.bodies)) == (1, 1)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (events({"error": {"message": "broke"}}), "aborted a stream: broke"),
        (events(b"{"), "not JSON"),
        (events(piece([5]), b"[DONE]"), "without a finish reason"),
        (events(piece([5], logprobs=None)), "1 ids with 0"),
        (events(piece([5]), broken=True), "ended a stream before reporting which weights sampled it"),
        (events(piece([5], "stop", weight_versions=[{"version": "1", "start": 0, "end": 2}])), "1 ids with weight"),
        (reply(b'{"error": {"message": "no"}}', 400), "answered 400: no"),
    ],
)
async def test_streams_that_cannot_be_used(make, script, message):
    async with Fake(script) as fake:
        with pytest.raises(InferenceError, match=message):
            await collect(make(fake))


# -- several servers


def test_no_servers_is_an_error():
    with pytest.raises(ValueError, match="name at least one server"):
        HTTPClient([])


async def test_a_server_under_a_new_address(make):
    async with Fake() as old, Fake(answer([5])) as new:
        client = make(old)
        client.replace_url(old.url, new.url + "/")
        assert client.urls == (new.url,)
        assert (await client.generate(PROMPT, PARAMS, session_id="s")).token_ids.tolist() == [5]


def spans_to(end: int, version: str = "1") -> dict:
    return {"weight_versions": [{"version": version, "start": 0, "end": end}]}


RESUMED = RoutingOptions(resume_tokens=2)


async def test_completion_of_a_dead_server_resumes_on_another_from_its_reported_ids(make):
    broken_events = events(piece([5], **spans_to(1)), piece([6, 7], **spans_to(3)), broken=True)
    rest = events(piece([8, 9], **spans_to(2, "2")), piece([4], "stop", **spans_to(3, "2")), b"[DONE]")
    async with Fake(broken_events) as dying, Fake(rest) as other:
        client = make(dying, other, routing=RESUMED)
        done = await client.generate(PROMPT, PARAMS, session_id="s")
    assert done.token_ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert np.allclose(done.logprobs, [-0.5, -0.6, -0.7, -0.8, -0.9, -0.4])
    assert (done.weight_versions, done.finish_reason) == (((1, 0, 3), (2, 3, 6)), "stop")
    [first], [second] = dying.bodies, other.bodies
    assert (first["stream"], first["sampling_params"]["stream_interval"]) == (True, 2)
    assert second["token_ids"] == [1, 2, 3, 5, 6, 7]
    assert (second["continued"], second["seed"], second["sampling_params"]["max_tokens"]) == (3, 4, 7)
    assert client.router.counts.resumed_tokens == 3
    assert [server.requests for server in client.router.servers] == [0, 0]


async def test_ids_without_versions_are_sampled_again_and_not_streamed_any_more(make):
    """vLLM names versions at the end of a stream."""
    broken_events = events(piece([5]), piece([6]), broken=True)
    complete = events(piece([7]), piece([8], "stop", **spans_to(2, "3")), b"[DONE]")
    async with Fake(broken_events) as dying, Fake(complete, answer([9])) as other:
        client = make(dying, other, routing=RESUMED)
        done = await client.generate(PROMPT, PARAMS, session_id="s")
        assert (done.token_ids.tolist(), done.weight_versions) == ([7, 8], ((3, 0, 2),))
        assert (await client.generate(PROMPT, PARAMS, session_id="s")).token_ids.tolist() == [9]
    assert [body["token_ids"] for body in other.bodies] == [[1, 2, 3]] * 2
    assert [body.get("stream") for body in other.bodies] == [True, None]


@pytest.mark.parametrize(
    ("params", "routing"),
    [
        (PARAMS, RoutingOptions(resume_tokens=0)),
        (PARAMS, RoutingOptions(resume_tokens=10)),
        (replace(PARAMS, max_tokens=None, guide=Guide(tag='{"format": {"type": "any_text"}}')), RESUMED),
    ],
)
async def test_completions_that_gain_nothing_from_reports_have_none(make, params, routing):
    async with Fake(answer([5])) as one, Fake() as other:
        await make(one, other, routing=routing).generate(PROMPT, params, session_id="s")
    assert "stream" not in one.bodies[0]


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_server_that_hangs_loses_its_requests_to_another_and_comes_back(make):
    routing = RoutingOptions(eject_after=2, health_interval=0.01, health_timeout=0.1)
    async with Fake(hang, answer([7])) as one, Fake(answer([5]), answer([6])) as other:
        client = make(one, other, routing=routing)
        one.healthy = False
        done = await client.generate(PROMPT, PARAMS, session_id="s")
        assert (done.token_ids.tolist(), client.router.servers[0].ejected) == ([5], True)
        assert (await client.generate(PROMPT, PARAMS, session_id="")).token_ids.tolist() == [6]
        one.healthy = True
        async with asyncio.timeout(10):
            while client.router.servers[0].ejected:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
        assert (await client.generate(PROMPT, PARAMS, session_id="")).token_ids.tolist() == [7]


async def test_health_checks_note_the_load_that_servers_report(make):
    checked = asyncio.Event()

    async def answer_when_checked(request: web.Request) -> web.StreamResponse:
        await checked.wait()
        return await answer([5])(request)

    async with Fake(answer_when_checked) as one, Fake() as other:
        client = make(one, other, routing=RoutingOptions(health_interval=0.01))
        other.load = b"[]"
        done = asyncio.create_task(client.generate(PROMPT, PARAMS, session_id="s"))
        async with asyncio.timeout(10):
            while one.loads_asked < 3:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
        assert [server.elsewhere for server in client.router.servers] == [2, 0]  # one of the three is its own
        assert other.loads_asked == 1
        checked.set()
        await done


async def test_when_no_server_is_healthy_tries_are_bounded_and_the_error_says_so(make):
    async with Fake() as one, Fake() as other:
        client = make(one, other, retries=2)
        client.eject(one.url)
        client.eject(other.url)
        with pytest.raises(InferenceError, match="after 3 tries: none of 2 servers is healthy"):
            await client.generate(PROMPT, PARAMS, session_id="s")
        assert not one.bodies + other.bodies


async def test_requests_beyond_the_limit_of_a_server_wait(make):
    reached, gate = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        reached.set()
        await gate.wait()
        return await answer([5])(request)

    async with Fake(slow, answer([6])) as fake:
        client = make(fake, routing=RoutingOptions(max_requests=1))
        calls = [asyncio.create_task(client.generate(PROMPT, PARAMS, session_id=name)) for name in "ab"]
        await reached.wait()
        assert (client.router.waiting, len(fake.bodies)) == (1, 1)
        gate.set()
        assert [done.token_ids.tolist() for done in await asyncio.gather(*calls)] == [[5], [6]]


async def test_deadline_error_names_sampled_tokens_key_and_remedy(make):
    gone = asyncio.Event()

    async def never_ends(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + orjson.dumps(piece([5, 6, 7], **spans_to(3))) + b"\n\n")
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return response

    routing = RoutingOptions(deadline=0.2, resume_tokens=2, max_requests=1)
    message = (
        r"of session s took more than 0.2 s \(inference.routing.deadline\), with 3 tokens sampled and 0 other requests"
    )
    async with Fake(never_ends, never_ends) as fake, Fake() as other:
        client = make(fake, other, routing=routing)
        client.eject(other.url)
        with pytest.raises(DeadlineExceeded, match=message) as caught:
            await client.generate(PROMPT, PARAMS, session_id="s")
        assert caught.value.retryable
        # The server is free of it, and nothing counts as in flight.
        await asyncio.wait_for(gone.wait(), 10)
        assert [server.requests for server in client.router.servers] == [0, 0]
        deltas = client.stream(PROMPT, PARAMS, session_id="s")
        assert (await anext(deltas)).token_ids.tolist() == [5, 6, 7]
        with pytest.raises(DeadlineExceeded, match=message):
            await anext(deltas)


async def test_a_deadline_includes_the_wait_for_a_server(make):
    async with Fake() as fake:
        client = make(fake, routing=RoutingOptions(deadline=0.1, max_requests=1))
        # The one place is taken all the while: a request with the same deadline might leave it in time for another.
        assignment = await client.router.acquire(RoutedRequest("a", PROMPT.token_ids, 1))
        with pytest.raises(DeadlineExceeded, match=r"of session b took more than 0\.1 s"):
            await client.generate(PROMPT, PARAMS, session_id="b")
        client.router.release(assignment)
    assert (fake.bodies, client.router.waiting) == ([], 0)
    assert client.router.servers[0].requests == 0


# -- guides

HELD = replace(PARAMS, guide=Guide(tag='{"format": {"type": "any_text"}}'))


async def test_a_guide_is_sent_as_its_tag(make):
    async with Fake(answer([5])) as fake:
        await make(fake).generate(PROMPT, HELD, session_id="s")
        with pytest.raises(StructuredOutputError, match="has no tag"):
            await make(fake).generate(PROMPT, replace(PARAMS, guide=Guide(schema={})), session_id="s")
    (body,) = fake.bodies
    assert body["sampling_params"]["structured_outputs"] == {"structural_tag": HELD.guide.tag}


async def test_refused_guided_request_raises_structured_output_error(make):
    refusal = reply(b'{"error": {"message": "no such grammar"}}', 400)
    async with Fake(refusal, refusal, refusal) as fake:
        with pytest.raises(StructuredOutputError, match="no such grammar"):
            await make(fake).generate(PROMPT, HELD, session_id="s")
        with pytest.raises(StructuredOutputError, match="no such grammar"):
            await collect(make(fake), HELD)
        with pytest.raises(RequestRefused, match="no such grammar"):
            await make(fake).generate(PROMPT, PARAMS, session_id="s")


async def test_interrupted_guided_completion_is_sampled_again(make):
    async with Fake(answer([5, 6], "abort", "1"), answer([7, 8], "stop", "2")) as fake:
        done = await make(fake).generate(PROMPT, HELD, session_id="s")
    assert (done.token_ids.tolist(), done.weight_versions) == ([7, 8], ((2, 0, 2),))
    assert np.allclose(done.logprobs, [-0.7, -0.8])
    one, other = fake.bodies
    assert one == other
    assert "continued" not in one


async def test_interrupted_guided_stream_resumes_only_before_its_first_id(make):
    spans = [{"version": "1", "start": 0, "end": 1}]
    first_piece = piece([5], weight_versions=spans)
    complete = events(first_piece, piece([6], "stop", weight_versions=[{**spans[0], "end": 2}]), b"[DONE]")
    async with Fake(events(piece([], "abort")), complete) as fake:
        deltas = await collect(make(fake), HELD)
    assert [token for delta in deltas for token in delta.token_ids.tolist()] == [5, 6]
    for broken in (events(first_piece, broken=True), events(first_piece, piece([], "abort", weight_versions=spans))):
        async with Fake(broken) as fake:
            with pytest.raises(InferenceError, match="repeat the request"):
                await collect(make(fake), HELD)
        assert len(fake.bodies) == 1


def scored(ids, reason="length", **changes) -> Answer:
    entries = [None, *({str(token): {"logprob": -token / 4, "rank": 3, "decoded_token": None}} for token in ids[1:])]
    choice = {"index": 0, "token_ids": [7], "logprobs": None, "finish_reason": reason}
    return reply(orjson.dumps({"choices": [choice], "prompt_logprobs": entries, **changes}))


async def test_given_ids_are_scored(make):
    async with Fake(drop, scored([], "abort", prompt_logprobs=None), scored([5, 1, 2])) as fake:
        logprobs = await make(fake).score(as_ids([5, 1, 2]), session_id="s")
        # The first id is predicted by nothing.
        assert logprobs.tolist() == [0.0, -0.25, -0.5]
        assert fake.sessions == ["s"] * 3
        assert fake.bodies[0]["token_ids"] == [5, 1, 2]
        assert fake.bodies[0]["sampling_params"]["prompt_logprobs"] == 0
        assert fake.bodies[0]["sampling_params"]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (scored([5, 1, 2], prompt_logprobs=None), "returned no prompt_logprobs: it cannot score"),
        (scored([5, 1]), "do not match the ids"),
        (scored([5, 1, 3]), "do not match the ids .KeyError.*'2'"),
        (scored([5, 1, 2], prompt_logprobs=[None, {"1": {"logprob": -9999.0}}, {"2": {"logprob": -1}}]), "not finite"),
        (reply(b"[]"), "do not match the ids"),
    ],
)
async def test_scores_that_cannot_be_used(make, script, message):
    async with Fake(script) as fake:
        with pytest.raises(InferenceError, match=message):
            await make(fake).score(as_ids([5, 1, 2]))


# -- routed experts


def rows(start: int, end: int) -> dict:
    """Return the routes of states [start, end): each row is the number of its state."""
    routes = np.tile(np.arange(start, end, dtype=np.uint8)[:, None, None], (1, 2, 2))
    return {"routed_experts": encode_routes(routes)}


async def test_routes_are_asked_for_from_the_first_new_token_and_join_over_interruptions(make):
    params = replace(PARAMS, routes_from=2)
    scripts = [
        answer([5], "abort", version="1", **rows(1, 3), logit_digests="64:aa"),
        answer([], "abort", version="2"),
        answer([6, 7], version="2", **rows(3, 5), logit_digests="128:bb"),
    ]
    async with Fake(*scripts) as fake:
        client = make(fake, routing=RoutingOptions(routed_experts=True))
        completion = await client.generate(PROMPT, params, session_id="s")
    starts = [body["sampling_params"]["routed_experts_prompt_start"] for body in fake.bodies]
    assert starts == [1, 3, 3]
    assert completion.routed_experts[:, 0, 0].tolist() == [1, 2, 3, 4]
    assert completion.digests == "64:aa 128:bb"


async def test_a_stream_ends_with_the_routes_of_all_its_pieces(make):
    spans = [{"version": "0", "start": 0, "end": 2}]
    script = events(piece([5], **rows(0, 3)), piece([6], "stop", weight_versions=spans, **rows(3, 4)))
    async with Fake(script) as fake:
        client = make(fake, routing=RoutingOptions(routed_experts=True))
        params = replace(PARAMS, routes_from=0)
        deltas = [delta async for delta in client.stream(PROMPT, params, session_id="s")]
    assert deltas[0].routed_experts is None
    assert deltas[-1].routed_experts[:, 1, 1].tolist() == [0, 1, 2, 3]


async def test_clients_without_router_replay_do_not_ask_for_routes(make):
    async with Fake(answer([5])) as fake:
        completion = await make(fake).generate(PROMPT, replace(PARAMS, routes_from=2), session_id="s")
    assert "routed_experts_prompt_start" not in fake.bodies[0]["sampling_params"]
    assert completion.routed_experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "without the routed experts of 2 tokens: launch its servers with inference.routed_experts"),
        (rows(0, 3), "without the routed experts of -1 tokens"),
        ({"routed_experts": "?"}, "routed experts are no .npy array"),
    ],
)
async def test_routes_that_do_not_fit_the_ids_are_an_error(make, changes, message):
    async with Fake(answer([5], **changes)) as fake:
        client = make(fake, routing=RoutingOptions(routed_experts=True))
        with pytest.raises(InferenceError, match=message):
            await client.generate(PROMPT, replace(PARAMS, routes_from=2), session_id="s")
