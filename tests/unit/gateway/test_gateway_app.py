"""The gateway over HTTP: who may do what, what is limited, what a stream shows while it waits, and what is left."""

from __future__ import annotations

import asyncio
import json
import re
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.gateway.gated_client import GatedClient
from support.gateway.server import ADMIN, ADMIN_HEADERS, Served, serving
from turnwise.errors import InferenceError
from turnwise.gateway.config import GatewayLimits
from turnwise.recorder.session import SessionLimits
from turnwise.trajectory_file import read_trajectories

ASK: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "Go."}]}
ROUTES = {"chat/completions": ASK, "messages": ASK, "responses": {"model": "m", "input": "Go."}}
SAID = {"role": "assistant", "content": "All done.", "reasoning_content": "Hm."}


ALIVE = {
    "chat/completions": rb": alive",
    "messages": rb'_delta","(text|thinking)":""',
    "responses": rb"event: response.in_progress",
}


def spoken(stream: bytes, kind: str) -> str:
    """What the deltas of a stream say so far, of any dialect."""
    text = ""
    for line in re.findall(rb"^data: (\{.*\})$", stream, re.MULTILINE):
        event = json.loads(line)
        if "choices" in event:
            delta = event["choices"][0]["delta"]
            text += delta.get("reasoning_content" if kind == "thoughts" else "content", "")
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("thinking" if kind == "thoughts" else "text", "")
        elif event["type"] == f"response.{'reasoning_text' if kind == 'thoughts' else 'output_text'}.delta":
            text += event["delta"]
    return text


async def post(served: Served, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with served.http.post(path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_only_the_right_key_opens_a_door() -> None:
    async with serving(lambda _: SAID) as served:
        one, two = await served.open(id="one"), await served.open(id="two")
        assert len(one["token"]) >= 40
        assert one["token"] != two["token"]
        agent = {"authorization": f"Bearer {one['token']}", "x-api-key": one["token"]}
        for path in ("/sessions", "/sessions/one/finalize", "/sessions/two/abort", "/sessions/one/rewards"):
            status, _ = await post(served, path, {"value": 1.0}, **agent)
            assert status == 401, path
        async with served.http.get("/sessions/one", headers=agent) as answer:
            assert answer.status == 401
        # A reward key is its session's alone, and the agent's route knows no rewards.
        reward = {"authorization": f"Bearer {one['reward_key']}"}
        assert (await post(served, "/sessions/two/rewards", {"value": 1.0}, **reward))[0] == 401
        assert (await post(served, "/sessions/none/rewards", {"value": 1.0}, **reward))[0] == 401
        assert (await post(served, one["path"] + "/rewards", {"value": 1.0}))[0] == 404
        assert (await post(served, "/sessions/one/rewards", {"value": 0.5, "name": "tests"}, **reward))[0] == 200
        assert (await post(served, f"/s/{one['reward_key']}/v1/chat/completions", ASK))[0] == 404
        guess = one["token"][:-1] + ("A" if one["token"][-1] != "A" else "B")
        assert (await post(served, f"/s/{guess}/v1/chat/completions", ASK))[0] == 404
        status, body = await post(served, "/sessions/one/finalize", {}, authorization=f"Bearer {ADMIN}")
        assert status == 200
        assert body["trajectory"]["rewards"] == [[None, "tests", 0.5]]
        assert (await post(served, one["path"] + "/v1/chat/completions", ASK))[0] == 404


async def test_last_reward_event_is_the_reward() -> None:
    async with serving(lambda _: SAID) as served:
        opened = await served.open(id="one")
        key = {"authorization": f"Bearer {opened['reward_key']}"}
        for value in (0.25, -1.0, 0.75):
            event = {"event_type": "reward", "data": {"value": value, "source": "agent"}}
            assert (await post(served, "/sessions/one/rewards", event, **key))[0] == 200
        note = {"event_type": "note", "data": {"text": "x"}}
        assert (await post(served, "/sessions/one/rewards", note, **key))[0] == 200
        for data, message in (({}, "data.value: is required"), ("x", "data: must be an object"), ({"v": 1}, "unknown")):
            status, body = await post(served, "/sessions/one/rewards", {"event_type": "reward", "data": data}, **key)
            assert status == 400
            assert message in body["error"]["message"]
        _, body = await post(served, "/sessions/one/finalize", {}, **ADMIN_HEADERS)
        assert sum(reward for *_, reward in body["trajectory"]["rewards"]) == 0.75


async def test_a_token_as_key_serves_clients_without_a_path() -> None:
    async with serving(lambda _: SAID) as served:
        opened = await served.open()
        status, _ = await post(served, "/v1/messages", ASK, **{"x-api-key": opened["token"]})
        assert status == 200
        status, _ = await post(served, "/v1/chat/completions", ASK, authorization=f"Bearer {opened['token']}")
        assert status == 200
        for key in ({}, {"authorization": "Bearer wrong"}):
            status, answer = await post(served, "/v1/chat/completions", ASK, **key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        async with served.http.head(opened["path"]) as answer:
            assert answer.status == 200


async def test_requests_beyond_the_limits_are_refused() -> None:
    limits = GatewayLimits(sessions=1, body_bytes=2000, requests=1, body_seconds=0.2)
    client = GatedClient(gate_after=0)
    async with serving(client=client, limits=limits) as served:
        opened = await served.open()
        path = opened["path"] + "/v1/messages"
        assert (await post(served, "/sessions", {}, **ADMIN_HEADERS))[0] == 429
        status, body = await post(served, path, {**ASK, "filler": "x" * 3000})
        assert (status, body["error"]["type"]) == (413, "request_too_large")

        async def drip() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

        async with served.http.post(path, data=drip()) as answer:
            assert answer.status == 408
        running = asyncio.ensure_future(post(served, path, ASK))
        await client.waiting.wait()
        status, body = await post(served, path, ASK)
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        client.gate.set()
        assert (await running)[0] == 200


@pytest.mark.parametrize("route", sorted(ROUTES))
async def test_stream_sends_samples_and_keep_alives(route: str) -> None:
    client = GatedClient(gate_after=8)
    limits = GatewayLimits(alive_seconds=0.02)
    async with serving(client=client, limits=limits) as served:
        opened = await served.open()
        async with served.http.post(f"{opened['path']}/v1/{route}", json={**ROUTES[route], "stream": True}) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            await client.waiting.wait()
            seen = b""
            # What was sampled is there although the turn has not ended, and signs of life follow each other.
            while spoken(seen, "thoughts") != "Hm." or len(re.findall(ALIVE[route], seen)) < 4:
                seen += await answer.content.readany()
            client.gate.set()
            seen += await answer.content.read()
        assert (spoken(seen, "thoughts"), spoken(seen, "text")) == ("Hm.", "All done.")
        assert served.session(opened).turns == 1
        if route != "chat/completions":
            names = re.findall(rb"^event: (\S+)$", seen, re.MULTILINE)
            kinds = [json.loads(line)["type"].encode() for line in re.findall(rb"^data: (.*)$", seen, re.MULTILINE)]
            assert names == kinds


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_leaves_nothing(stream: bool) -> None:
    client = GatedClient(gate_after=4)
    async with serving(client=client) as served:
        opened = await served.open()
        async with aiohttp.ClientSession(served.url) as other:
            asking = asyncio.ensure_future(other.post(opened["path"] + "/v1/messages", json={**ASK, "stream": stream}))
            await client.waiting.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(client.stopped.wait(), 10)
        assert served.session(opened).turns == 0


@pytest.mark.parametrize(
    ("route", "status", "kind"),
    [
        ("chat/completions", 503, "server_error"),
        ("messages", 529, "overloaded_error"),
        ("responses", 503, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_fails_at_once_is_told_by_a_status(
    route: str, status: int, kind: str, stream: bool
) -> None:
    async with serving([InferenceError("down"), SAID]) as served:
        opened = await served.open()
        path = f"{opened['path']}/v1/{route}"
        answered, body = await post(served, path, {**ROUTES[route], "stream": stream})
        assert (answered, body["error"]["type"]) == (status, kind)
        # The same request again is answered.
        assert (await post(served, path, ROUTES[route]))[0] == 200
        assert served.session(opened).turns == 1


@pytest.mark.parametrize(
    ("route", "event"),
    [
        ("chat/completions", b'"error":{"message"'),
        ("messages", b"event: error"),
        ("responses", b"event: response.failed"),
    ],
)
async def test_a_server_that_fails_in_the_middle_is_told_by_an_event(route: str, event: bytes) -> None:
    client = GatedClient(gate_after=8, fail=True)
    client.gate.set()
    async with serving(client=client, limits=GatewayLimits(first_seconds=0.0)) as served:
        opened = await served.open()
        async with served.http.post(f"{opened['path']}/v1/{route}", json={**ROUTES[route], "stream": True}) as answer:
            seen = await answer.content.read()
        assert event in seen
        assert b"message_stop" not in seen
        assert b"response.completed" not in seen
        assert b'finish_reason":"stop' not in seen
        assert served.session(opened).turns == 0


@pytest.mark.parametrize("route", sorted(ROUTES))
async def test_a_context_that_is_full_is_told_in_the_words_that_agents_know(route: str) -> None:
    async with serving([SAID], session_limits=SessionLimits(context_length=5)) as served:
        opened = await served.open()
        status, body = await post(served, f"{opened['path']}/v1/{route}", ROUTES[route])
        assert status == 400
        used, limit = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", body["error"]["message"]).groups()  # type: ignore[union-attr]
        assert int(used) > int(limit) == 4
        if route != "messages":
            assert body["error"]["code"] == "context_length_exceeded"


async def test_a_session_that_ends_is_on_disk_and_known_after_a_restart(tmp_path: Path) -> None:
    finished = tmp_path / "finished.twz"
    admin = {"authorization": f"Bearer {ADMIN}"}
    async with serving(lambda _: SAID, finished=finished) as served:
        finished_session, given_up = await served.open(id="kept", group_id="g1"), await served.open(id="given_up")
        for opened in (finished_session, given_up, await served.open(id="open")):
            assert (await post(served, opened["path"] + "/v1/messages", ASK))[0] == 200
        status, body = await post(served, "/sessions/kept/finalize", {"stop_reason": "max_turns"}, **admin)
        assert status == 200
        assert (await post(served, "/sessions/given_up/abort", {}, **admin))[0] == 200
        assert (await post(served, "/sessions/kept/finalize", {}, **admin))[0] == 404
    # What was sampled is on record, however its session ended; the last one ended with the gateway.
    kept_trajectory, *other_trajectories = read_trajectories(finished)
    assert (
        kept_trajectory.id,
        kept_trajectory.group_id,
        kept_trajectory.stop_reason,
        len(kept_trajectory.segments),
    ) == ("kept", "g1", "max_turns", 2)
    assert json.loads(kept_trajectory.to_bytes()) == body["trajectory"]
    ends = [(other.id, other.stop_reason, len(other.segments)) for other in other_trajectories]
    assert ends == [("given_up", "cancelled", 2), ("open", "cancelled", 2)]
    async with serving(lambda _: SAID, finished=finished) as served:
        for session_id in ("kept", "given_up", "open"):
            assert (await post(served, "/sessions", {"id": session_id}, **admin))[0] == 409
        await served.open(id="new")


async def test_a_disk_that_takes_nothing_more_loses_no_session(tmp_path: Path) -> None:
    finished = tmp_path / "finished.twz"
    async with serving(lambda _: SAID, finished=finished) as served:
        opened = await served.open(id="one")
        assert (await post(served, opened["path"] + "/v1/messages", ASK))[0] == 200
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        try:
            status, body = await post(served, "/sessions/one/finalize", {}, **ADMIN_HEADERS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert (status, body["error"]["message"][:13]) == (507, "session 'one'")
        # It goes on, and ends once there is room.
        assert (await post(served, opened["path"] + "/v1/messages", ASK))[0] == 200
        assert (await post(served, "/sessions/one/finalize", {}, **ADMIN_HEADERS))[0] == 200
    (trajectory,) = read_trajectories(finished)
    assert trajectory.metrics["turns"] == 2


async def test_ending_a_session_cancels_its_requests() -> None:
    client = GatedClient(gate_after=4)
    async with serving(client=client) as served:
        opened = await served.open(id="one")
        asking = asyncio.ensure_future(post(served, opened["path"] + "/v1/messages", ASK))
        await client.waiting.wait()
        status, body = await post(served, "/sessions/one/finalize", {}, authorization=f"Bearer {ADMIN}")
        assert (status, body["trajectory"]["segments"]) == (200, [])
        assert (await asking)[0] == 404
        assert client.stopped.is_set()


@pytest.mark.parametrize(
    ("route", "event"),
    [
        ("chat/completions", b'"error":{"message":"the session ended'),
        ("messages", b"event: error"),
        ("responses", b"event: response.failed"),
    ],
)
async def test_a_stream_of_a_session_that_is_ended_ends_with_an_error(route: str, event: bytes) -> None:
    client = GatedClient(gate_after=8)
    async with serving(client=client, limits=GatewayLimits(first_seconds=0.0)) as served:
        opened = await served.open(id="one")
        async with served.http.post(f"{opened['path']}/v1/{route}", json={**ROUTES[route], "stream": True}) as answer:
            await client.waiting.wait()
            status, body = await post(served, "/sessions/one/finalize", {}, authorization=f"Bearer {ADMIN}")
            assert (status, body["trajectory"]["segments"]) == (200, [])
            seen = await answer.content.read()
        assert event in seen
        for end in (b"message_stop", b"response.completed", b'finish_reason":"stop'):
            assert end not in seen


async def test_a_request_that_takes_too_long_ends_its_stream_with_an_error() -> None:
    limits = GatewayLimits(first_seconds=0.0, request_seconds=0.2)
    client = GatedClient(gate_after=2)
    async with serving(client=client, limits=limits) as served:
        opened = await served.open()
        async with served.http.post(f"{opened['path']}/v1/messages", json={**ASK, "stream": True}) as answer:
            assert b"event: error" in await answer.content.read()
        assert (await post(served, f"{opened['path']}/v1/messages", ASK))[0] == 504
        assert served.session(opened).turns == 0
        assert client.stopped.is_set()


async def test_request_without_stream_is_sampled_without_stream() -> None:
    client = GatedClient(gate_after=0)
    client.gate.set()
    async with serving(client=client) as served:
        opened = await served.open()
        for route, body in ROUTES.items():
            assert (await post(served, f"{opened['path']}/v1/{route}", body))[0] == 200
        assert client.streams == 0
        async with served.http.post(opened["path"] + "/v1/messages", json={**ASK, "stream": True}) as answer:
            await answer.read()
        assert (client.streams, served.session(opened).turns) == (1, 4)


async def test_a_reward_names_a_turn_of_its_session() -> None:
    async with serving(lambda _: SAID) as served:
        one, two = await served.open(id="one"), await served.open(id="two")
        for opened in (one, two, one):
            await post(served, opened["path"] + "/v1/messages", ASK)
        async with served.http.get("/sessions/one", headers=ADMIN_HEADERS) as answer:
            turns = (await answer.json())["turn_ids"]
        assert len(turns) == 2
        reward = {"authorization": f"Bearer {one['reward_key']}"}
        reward_body = {"value": 1.0, "turn_id": turns[1]}
        assert (await post(served, "/sessions/one/rewards", reward_body, **reward))[0] == 200
        status, body = await post(served, "/sessions/one/rewards", {**reward_body, "turn_id": "t9"}, **reward)
        assert (status, body["error"]["param"]) == (400, "turn_id")
        status, body = await post(served, "/sessions/one/rewards", {"value": 1.0, "turn": turns[1]}, **reward)
        assert (status, body["error"]["param"]) == (400, "turn")
        status, body = await post(served, "/sessions/one/finalize", {"reason": "error"}, **ADMIN_HEADERS)
        assert (status, body["error"]["param"]) == (400, "reason")
        # One whose answer was lost is sent again.
        for _ in range(2):
            assert (await post(served, "/sessions/one/rewards", {"value": 2, "id": "r"}, **reward))[0] == 200
        status, body = await post(served, "/sessions/one/rewards", {"value": 3, "id": "r"}, **reward)
        assert (status, body["error"]["param"]) == (400, "id")
        assert "another reward: reward = 2" in body["error"]["message"]
        _, body = await post(served, "/sessions/one/finalize", {}, **ADMIN_HEADERS)
        assert body["trajectory"]["rewards"] == [[turns[1], "reward", 1.0], [None, "reward", 2.0]]


@pytest.mark.parametrize(
    ("lines", "limits", "reason"),
    [
        ([SAID, InferenceError("down")], {}, "error"),
        ([SAID, InferenceError("down"), SAID], {}, "completed"),
        ([SAID, SAID], {"max_turns": 1}, "max_turns"),
        ([SAID, SAID], {"max_total_tokens": 5}, "max_tokens"),
    ],
)
async def test_completed_session_takes_the_stop_reason_of_its_failure(
    lines: list[Any], limits: dict[str, int], reason: str
) -> None:
    bounds = SessionLimits(context_length=1000, **limits)
    async with serving(lines, session_limits=bounds) as served:
        opened = await served.open(id="one")
        for _ in lines:
            await post(served, opened["path"] + "/v1/chat/completions", ASK)
        _, body = await post(served, "/sessions/one/finalize", {}, **ADMIN_HEADERS)
    assert body["trajectory"]["stop_reason"] == reason
    assert (body["trajectory"]["error"] is not None) == (reason == "error")


@pytest.mark.parametrize("settings", [{"seconds": 0.001}, {}])
async def test_sessions_whose_time_is_over_are_ended(settings: dict[str, Any], tmp_path: Path) -> None:
    finished = tmp_path / "finished.twz"
    limits = GatewayLimits() if settings else GatewayLimits(idle_seconds=0.001)
    async with serving(lambda _: SAID, finished=finished, limits=limits) as served:
        opened = await served.open(**settings)
        while not await served.app.sessions.sweep():  # noqa: ASYNC110 - the clock has no event
            await asyncio.sleep(0.001)
        assert len(served.app.sessions) == 0
        assert (await post(served, opened["path"] + "/v1/messages", ASK))[0] == 404
    (trajectory,) = read_trajectories(finished)
    assert trajectory.stop_reason == "timeout"


async def test_session_with_a_running_request_is_not_idle() -> None:
    client = GatedClient(gate_after=0)
    async with serving(client=client, limits=GatewayLimits(idle_seconds=0.001)) as served:
        opened = await served.open()
        running = asyncio.ensure_future(post(served, opened["path"] + "/v1/messages", ASK))
        await client.waiting.wait()
        # Long idle by its last use, which was the beginning of the request.
        served.app.sessions.of_id(opened["id"]).used = 0.0
        assert await served.app.sessions.sweep() == 0
        client.gate.set()
        assert (await running)[0] == 200


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"a": ' * 100_000])
async def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async with serving([SAID]) as served:
        opened = await served.open()
        async with served.http.post(opened["path"] + "/v1/chat/completions", data=body) as answer:
            assert answer.status == 400


async def test_half_characters_and_long_numbers_are_taken() -> None:
    async with serving([SAID]) as served:
        opened = await served.open()
        body = b'{"metadata": {"x": 123456789012345678901234567890}, '
        body += b'"messages": [{"role": "user", "content": "a\\ud83d"}]}'
        async with served.http.post(opened["path"] + "/v1/chat/completions", data=body) as answer:
            assert answer.status == 200


async def test_no_id_is_given_twice() -> None:
    ids: list[str] = []
    async with serving(lambda _: SAID) as served:
        opened = await served.open()
        for route, body in ROUTES.items():
            for _ in range(3):
                answer = (await post(served, f"{opened['path']}/v1/{route}", body))[1]
                ids += [answer["id"], *(item["id"] for item in answer.get("output", ()))]
    assert len(set(ids)) == len(ids)


@pytest.mark.long
async def test_a_client_that_takes_nothing_is_let_go() -> None:
    requested = asyncio.Event()

    def say(_: object) -> str:
        requested.set()
        return "word " * 40_000

    async with serving(say, limits=GatewayLimits(write_seconds=0.3)) as served:
        opened = await served.open()
        body = json.dumps({"stream": True, "messages": ASK["messages"]}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]), limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        head = f"POST {opened['path']}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        running = served.app.sessions.of_id(opened["id"]).running
        async with asyncio.timeout(30):
            await requested.wait()
            while running:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.05)
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_failures_of_the_gateway_itself_are_errors_of_the_trajectory(route: str, stream: bool) -> None:
    def fail(_: Any) -> Any:
        raise TypeError("a defect")

    async with serving(fail) as served:
        opened = await served.open(id="one")
        async with served.http.post(f"{opened['path']}/v1/{route}", json={**ROUTES[route], "stream": stream}) as answer:
            assert answer.status == 500
            assert b"TypeError: a defect" in await answer.read()
        _, body = await post(served, "/sessions/one/finalize", {}, **ADMIN_HEADERS)
        assert body["trajectory"]["stop_reason"] == "error"
        assert body["trajectory"]["error"] == "GatewayError: TypeError: a defect"


@pytest.mark.parametrize(
    ("schema", "field"),
    [({"required": [{}]}, "required"), ({"required": 3}, "required"), ({"properties": []}, "properties")],
)
async def test_tool_schemas_that_name_no_parameters_are_refused(schema: dict[str, Any], field: str) -> None:
    function = {"name": "f", "parameters": schema}
    bodies: dict[str, Any] = {
        "chat/completions": {**ASK, "tools": [{"type": "function", "function": function}]},
        "messages": {**ASK, "tools": [{"name": "f", "input_schema": schema}]},
        "responses": {"model": "m", "input": "Go.", "tools": [{"type": "function", **function}]},
    }
    async with serving(lambda _: SAID) as served:
        opened = await served.open()
        for route, request in bodies.items():
            status, body = await post(served, f"{opened['path']}/v1/{route}", request)
            assert (status, f".{field}: must be" in body["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("method", "route", "words"),
    [
        ("GET", "v1/responses/resp_1", "previous_response_id"),
        ("POST", "v1/responses/compact", "compact in the agent"),
        ("POST", "tokenize", "count_tokens"),
        ("POST", "v1/embeddings", "/v1/chat/completions"),
        ("GET", "version", "/v1/models"),
    ],
)
async def test_missing_route_says_what_to_use(method: str, route: str, words: str) -> None:
    async with serving() as served:
        opened = await served.open()
        body = {"model": "m", "prompt": [[1, 2]], "echo": True, "logprobs": 1}
        async with served.http.request(method, f"{opened['path']}/{route}", json=body) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (404, "not_found")
        assert f"{method} /{route.removeprefix('v1/')}" in error["message"]
        assert words in error["message"]
