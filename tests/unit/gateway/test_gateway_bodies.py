"""Bodies that no honest client sends: none of them ends in an error of the server, stalls it, or costs a trajectory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.chat.model_dirs import renderer_for
from support.gateway.server import ADMIN_HEADERS, Served, serving
from turnwise.errors import FormatError
from turnwise.gateway.config import GatewayLimits
from turnwise.gateway.dialects.anthropic import read_messages_request
from turnwise.gateway.dialects.core import Abilities
from turnwise.gateway.dialects.openai_responses import OpenAIResponses
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import SessionLimits
from turnwise.trajectory_file import read_trajectories
from turnwise.types import SamplingParams, TokenDelta, TokenPrompt

HALF = "\ud83d x"
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Go."}]},
    "messages": {"messages": [{"role": "user", "content": "Go."}]},
    "responses": {"input": "Go."},
}


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


async def post(served: Served, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    # As Python writes it: with half surrogate pairs.
    async with served.http.post(path, data=json.dumps(body), headers=headers) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
async def test_lone_surrogates_are_no_server_error(route: str, stream: bool) -> None:
    def tool(schema: Any) -> dict[str, Any]:
        described = {"name": "f", "description": HALF}
        if route == "messages":
            return {**described, "input_schema": schema}
        function = {**described, "parameters": schema}
        return {"type": "function", **({"function": function} if route == "chat/completions" else function)}

    odd: list[dict[str, Any]] = [
        {"model": HALF}, {"metadata": {HALF: HALF}, "user": HALF}, {"metadata": nested(300)},
        {"tools": [tool({HALF: HALF})]},
        {"chat_template_kwargs": {HALF: 1}}, {"instructions": HALF}, {"temperature": HALF}, {HALF: HALF},
    ]  # fmt: skip
    async with serving(lambda _: "Yes.") as served:
        opened = await served.open()
        for text in odd:
            status, answer = await post(
                served, f"{opened['path']}/v1/{route}", {**BODIES[route], **text, "stream": stream}
            )
            assert status in (200, 400), (text, answer)
            named = (b"chat_template_kwargs", b"temperature", b"no such field")
            assert status == 200 or any(name in answer for name in named), answer
        body = {**BODIES[route], "tools": [tool({"type": "object", "x": nested(900)})], "stream": stream}
        status, answer = await post(served, f"{opened['path']}/v1/{route}", body)
        assert (status, b"nested too deep" in answer) == (400, True), answer
        # What the session's controller says of it is written as well.
        reward = {"authorization": f"Bearer {opened['reward_key']}"}
        assert (await post(served, f"/sessions/{opened['id']}/rewards", {"value": 1, "name": HALF}, **reward))[0] == 200
        finalize_path = f"/sessions/{opened['id']}/finalize"
        assert (await post(served, finalize_path, {"error": HALF}, **ADMIN_HEADERS))[0] == 200


def test_many_small_items_cost_no_more_than_they_are() -> None:
    def spent(count: int) -> float:
        reminded = {"messages": [BODIES["messages"]["messages"][0], *[{"role": "system", "content": "x"}] * count]}
        item = {"type": "message", "role": "assistant", "content": "x"}
        request = {"input": [item] * count}
        began = time.process_time()
        read_messages_request(reminded, Abilities())
        OpenAIResponses().read(request, Abilities())
        return time.process_time() - began

    # Their square would be 256 times as much.
    assert spent(32_000) < 64 * max(spent(2_000), 0.002)


async def test_an_id_that_no_path_can_hold_names_no_session() -> None:
    async with serving(lambda _: "Yes.") as served:
        for wrong in ("a/b", "..", "."):
            status, answer = await post(served, "/sessions", {"id": wrong}, **ADMIN_HEADERS)
            assert (status, b"id: is " in answer) == (400, True)
        assert len(served.app.sessions) == 0


async def test_a_route_without_its_version_speaks_the_same_api() -> None:
    async with serving(lambda _: "Yes.") as served:
        opened = await served.open()
        _, answer = await post(served, f"{opened['path']}/messages", BODIES["messages"])
        assert json.loads(answer)["type"] == "message"


async def test_a_session_whose_end_is_cancelled_is_still_written(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.twz"
    async with serving(lambda _: "Yes.", finished=file) as served:
        opened = await served.open(id="one")
        await post(served, f"{opened['path']}/v1/messages", BODIES["messages"])
        ending = asyncio.ensure_future(served.app.sessions.end("one"))
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        # What is noted now would be in no trajectory.
        reward = {"authorization": f"Bearer {opened['reward_key']}"}
        assert (await post(served, "/sessions/one/rewards", {"value": 1.0}, **reward))[0] in (401, 409)
        await served.app.sessions.close()
    assert [trajectory.id for trajectory in read_trajectories(file)] == ["one"]


async def test_a_trajectory_that_cannot_be_written_keeps_no_other_from_its_end(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.twz"
    async with serving(lambda _: "Yes.", finished=file) as served:
        first, _ = await served.open(id="first"), await served.open(id="second")
        entry = served.app.sessions.of_id(first["id"])
        entry.rewards.append((None, "reward", float("nan")))
        for _ in range(2):
            with pytest.raises(FormatError):
                await served.app.sessions.end("first")
        for name in ("first", "second"):
            served.app.sessions.of_id(name).expires = 0.0
        assert await served.app.sessions.sweep() == 1
        await served.open(id="third")
        await served.app.sessions.close()
    assert [trajectory.id for trajectory in read_trajectories(file)] == ["second", "third"]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_tokenizer_panic_ends_the_stream_with_an_error(stream: bool) -> None:
    limits = GatewayLimits(body_bytes=16 * 2**20, first_seconds=30)
    async with serving(lambda _: "Yes.", limits=limits, session_limits=SessionLimits(context_length=10**8)) as served:
        opened = await served.open()
        body = {"messages": [{"role": "user", "content": " " * 12_000_000}], "stream": stream}
        async with asyncio.timeout(60):
            status, answer = await post(served, f"{opened['path']}/v1/chat/completions", body)
        assert status == 400, answer
        assert b"the tokenizer fails on a text of 12" in answer
        assert b"shorten it" in answer
        assert (await post(served, f"{opened['path']}/v1/chat/completions", BODIES["chat/completions"]))[0] == 200


class _Fault(BaseException):
    """What no handler of Exception sees."""


class _Faulty(ScriptedClient):
    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        async for piece in super().stream(prompt, params, session_id=session_id):
            yield piece
            raise _Fault("broken")


async def test_any_error_ends_the_stream() -> None:
    client = _Faulty(renderer_for("qwen3"), lambda _: "Yes, and more than one piece of it.")
    async with serving(client=client) as served:
        opened = await served.open()
        body = {**BODIES["chat/completions"], "stream": True}
        async with asyncio.timeout(30):
            status, answer = await post(served, f"{opened['path']}/v1/chat/completions", body)
        assert b"_Fault: broken" in answer, (status, answer)
        assert served.session(opened).turns == 0


def test_bodies_are_bounded_by_default() -> None:
    assert GatewayLimits().body_bytes == 8 * 2**20
