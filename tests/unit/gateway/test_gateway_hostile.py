"""An agent that wants more than its turns: rewards, other sessions, everybody's time and memory. It gets none of it."""

from __future__ import annotations

import asyncio
import itertools
import resource
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import yarl

from support.gateway.gated_client import SAID, GatedClient
from support.gateway.server import ADMIN, ADMIN_HEADERS, Served, serving
from turnwise.gateway.config import GatewayLimits
from turnwise.inference.scripted import ScriptedRequest
from turnwise.recorder.session import SessionLimits

ASK: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "Go."}]}


async def send(served: Served, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    # As it is: a client that would tidy the path up is not hostile.
    url = yarl.URL(served.url + path, encoded=True)
    async with served.http.request(method, url, json=body, headers=headers) as answer:
        return answer.status, await answer.read()


def keys(token: str) -> list[dict[str, str]]:
    """All ways in which a client can hold up a key."""
    return [{"authorization": f"Bearer {token}"}, {"authorization": token}, {"x-api-key": token}, {"cookie": token}]


async def test_an_agent_cannot_write_its_own_reward_or_end_its_own_session() -> None:
    async with serving(lambda _: SAID) as served:
        opened = await served.open(id="mine")
        token, base = opened["token"], opened["path"]
        assert (await send(served, "POST", f"{base}/v1/messages", ASK))[0] == 200
        routes = ["sessions/mine/rewards", "sessions/mine/finalize", "sessions/mine/abort", "sessions", "sessions/mine"]
        prefixes = [
            "",
            base,
            f"{base}/v1",
            f"{base}/..",
            f"{base}/../..",
            f"{base}/%2e%2e/%2e%2e",
            f"/s/{token}%2f..%2f..",
        ]
        claims = {"value": 1.0, "turn_id": None, "stop_reason": "completed", "key": ADMIN[:-1]}
        for prefix, route, method, key in itertools.product(prefixes, routes, ("POST", "GET", "PUT"), keys(token)):
            status, body = await send(served, method, f"{prefix}/{route}?key={token}", claims, **key)
            assert status in (401, 404), (prefix, route, method)
            assert ADMIN.encode() not in body
            assert opened["reward_key"].encode() not in body
        # Nor by what it says in a turn.
        told_in_turn = {**ASK, "metadata": {"reward": 1.0, "user_id": "x"}}
        assert (await send(served, "POST", f"{base}/v1/messages", told_in_turn))[0] == 200
        _, state = await send(served, "GET", "/sessions/mine", **ADMIN_HEADERS)
        assert b'"rewards":[]' in state
        assert len(served.app.sessions) == 1
        assert b"reward_key" not in state
        assert token.encode() not in state


async def test_a_session_cannot_see_or_use_another() -> None:
    async with serving(lambda _: SAID) as served:
        first, other = await served.open(id="mine"), await served.open(id="other")
        body = {"model": "m", "input": "Go."}
        status, answer = await served_json(served, f"{other['path']}/v1/responses", body)
        assert status == 200
        # Another session's response is none that this one knows.
        status, _ = await served_json(
            served, f"{first['path']}/v1/responses", {**body, "previous_response_id": answer["id"]}
        )
        assert status in (400, 404)
        token = other["token"]
        guesses = [
            "", "other", other["id"], other["reward_key"], token[:-1], token + "A", token.swapcase(), token[::-1],
            f"{first['token']}/../{token[:-1]}", "%00", "*", "x" * 100_000, "..", first["token"] + token,
        ]  # fmt: skip
        for guess in guesses:
            for route in ("v1/chat/completions", "v1/models", ""):
                status, seen = await send(served, "POST", f"/s/{guess}/{route}", ASK)
                # 400: the server takes no such line at all; 431: nor one so long.
                assert status in (400, 404, 431), guess[:50]
                assert b"other" not in seen
        assert (served.session(other).turns, served.session(first).turns) == (1, 0)


async def served_json(served: Served, path: str, body: Any) -> tuple[int, Any]:
    async with served.http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def test_a_flood_is_held_back_and_others_are_served_meanwhile() -> None:
    client = GatedClient(gate_after=0)
    async with serving(client=client, limits=GatewayLimits(requests=4)) as served:
        flooding, other = await served.open(), await served.open()
        path = flooding["path"] + "/v1/messages"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(served.url, connector=connector) as flood:

            async def shoot() -> int:
                async with flood.post(path, json=ASK) as answer:
                    await answer.read()
                    return answer.status

            shots = [asyncio.ensure_future(shoot()) for _ in range(200)]
            for refused, done in enumerate(asyncio.as_completed(shots), 1):
                assert await done == 429
                if refused == 196:
                    break
            assert len(served.app.sessions.of_id(flooding["id"]).running) == 4
            asking = asyncio.ensure_future(send(served, "POST", other["path"] + "/v1/messages", ASK))
            client.gate.set()
            assert (await asking)[0] == 200
            statuses = await asyncio.gather(*shots)
        assert sorted(statuses) == [200] * 4 + [429] * 196
        assert not served.app.sessions.of_id(flooding["id"]).running
        assert (await send(served, "POST", path, ASK))[0] == 200
        assert served.session(flooding).turns == 5


async def test_session_limits_hold_under_concurrent_requests() -> None:
    sampled = 0

    def count(request: ScriptedRequest) -> Any:
        nonlocal sampled
        sampled += 1
        return SAID

    bounds = SessionLimits(context_length=10_000, max_turns=5)
    async with serving(count, session_limits=bounds) as served:
        opened = await served.open()
        path = opened["path"] + "/v1/messages"
        statuses = await asyncio.gather(*(send(served, "POST", path, ASK) for _ in range(60)))
        assert sorted(status for status, _ in statuses) == [200] * 5 + [400] * 55
        # Many answers of one request are many turns.
        status, _ = await send(served, "POST", opened["path"] + "/v1/chat/completions", {**ASK, "n": 16})
        assert (status, sampled) == (400, 5)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_of_100_mb_is_refused_and_not_kept(declared: bool) -> None:
    size, piece = 100 * 2**20, b" " * 2**20
    async with serving(lambda _: SAID) as served:
        opened = await served.open()
        baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        async def body() -> AsyncIterator[bytes]:
            for _ in range(size // len(piece)):
                yield piece

        headers = {"content-length": str(size)} if declared else {}
        path = opened["path"] + "/v1/messages"
        async with served.http.post(path, data=body(), headers=headers) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["type"] == "request_too_large"
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - baseline) * 1024
        assert growth < 70 * 2**20, "at most what a body may have, and what joins it"
        assert not served.app.sessions.of_id(opened["id"]).running
        assert (await send(served, "POST", path, ASK))[0] == 200


async def test_unread_stream_ends_and_frees_its_session() -> None:
    client = GatedClient(gate_after=1)
    limits = GatewayLimits(request_seconds=0.3, alive_seconds=0.05, first_seconds=0.0, requests=1)
    async with serving(client=client, limits=limits) as served:
        opened = await served.open()
        path = opened["path"] + "/v1/messages"
        # The model never goes on, and the client would wait forever.
        async with served.http.post(path, json={**ASK, "stream": True}) as answer:
            seen = await answer.content.read()
        assert seen.rstrip().splitlines()[-2] == b"event: error"
        await asyncio.wait_for(client.stopped.wait(), 10)
        assert not served.app.sessions.of_id(opened["id"]).running
        assert served.session(opened).turns == 0
        client.gate.set()
        assert (await send(served, "POST", path, ASK))[0] == 200
