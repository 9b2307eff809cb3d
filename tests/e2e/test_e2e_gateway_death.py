"""A gateway process is killed: ended sessions are kept, open ones continue."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from support.crash.moments import MID_GENERATION, MID_JOURNAL, MID_TOOL, RESET
from support.rollout.record_files import record_bytes, write_records
from support.trainer.lookup_run import silent
from turnwise.gateway.config import GatewayConfig
from turnwise.gateway.server import GatewayProcess
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.config import InferenceConfig
from turnwise.recorder.ledger import read_ledger
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory_file import read_trajectories

pytestmark = pytest.mark.long
ASK = {"model": "any", "messages": [{"role": "user", "content": "Who manages Ada?"}], "max_tokens": 16}


class Client:
    """Talks to one gateway."""

    def __init__(self, gateway: GatewayProcess, http: aiohttp.ClientSession) -> None:
        self.gateway, self.http = gateway, http

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        async with self.http.post(self.gateway.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def open(self, name: str) -> str:
        opened = await self.post("/sessions", {"id": name}, **self.gateway.admin_headers)
        return f"{opened['path']}/v1/chat/completions"

    async def end(self, name: str) -> None:
        await self.post(f"/sessions/{name}/finalize", {}, **self.gateway.admin_headers)


@asynccontextmanager
async def gateway_at(model: Path, out: Path, url: str) -> AsyncIterator[Client]:
    gateway = GatewayProcess(GatewayConfig(model=model, out=out, port=0, url=url))
    await gateway.launch()
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(gateway, http)
    finally:
        await gateway.close()


async def kill(client: Client) -> None:
    assert client.gateway.pid is not None
    died = asyncio.create_task(client.gateway.wait_died())
    os.kill(client.gateway.pid, signal.SIGKILL)
    await died


async def at(moment: str, client: Client, replica: BuiltinReplica) -> None:
    """Kill the gateway when a further session has come so far."""
    path = await client.open(f"lost at {moment}")
    if moment == MID_TOOL:
        # The turn is answered, and its agent runs a tool.
        await client.post(path, ASK)
    if moment == MID_GENERATION:
        await replica.pause()
        asking = asyncio.create_task(client.post(path, ASK))
        async with asyncio.timeout(60):
            while not (stats := await replica.stats())["running"] + stats["waiting"]:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await kill(client)
        await replica.resume()
        with pytest.raises(aiohttp.ClientError):
            await asking
        return
    await kill(client)


async def test_a_gateway_that_is_killed_keeps_every_session(lookup_model: Path, tmp_path: Path) -> None:
    out, file, ended_ids = tmp_path / "out", tmp_path / "out" / "trajectories.twz", list[str]()
    replica = BuiltinReplica(lookup_model, InferenceConfig(), log_file=tmp_path / "server.log")
    await replica.launch()
    try:
        for moment in (RESET, MID_TOOL, MID_GENERATION, MID_JOURNAL):
            async with gateway_at(lookup_model, out, replica.url) as client:
                ended_ids.append(f"ended before {moment}")
                path = await client.open(ended_ids[-1])
                await client.post(path, ASK)
                await client.end(ended_ids[-1])
                await at(moment, client, replica)
            assert [trajectory.id for trajectory in read_trajectories(file)] == ended_ids
            assert audit_run(out, console=silent()).contradictions == []
        # What a kill leaves of a record that is being written.
        file.write_bytes(file.read_bytes() + record_bytes(file)[-1][:-1])
        async with gateway_at(lookup_model, out, replica.url) as client:
            path = await client.open("the last")
            await client.post(path, ASK)
            await client.end("the last")
    finally:
        await replica.close()
    trajectories = list(read_trajectories(file))
    assert [trajectory.id for trajectory in trajectories[: len(ended_ids) + 1]] == [*ended_ids, "the last"]
    # What was open at a kill went on, until the gateway ended in order.
    went_on = {
        trajectory.id.removeprefix("lost at "): (trajectory.stop_reason, trajectory.metrics["turns"])
        for trajectory in trajectories[5:]
    }
    turns = {RESET: 0, MID_TOOL: 1, MID_GENERATION: 0, MID_JOURNAL: 0}
    assert went_on == {moment: ("cancelled", count) for moment, count in turns.items()}
    assert audit_run(out, console=silent()).contradictions == []


KILLS = 30
MOST_EVENTS = 60
AGENTS = 6
TURNS = 5
FAILED = (aiohttp.ClientError, ConnectionError, TimeoutError)


class Retrying:
    """Agents over plain HTTP, which send again what was not answered.

    Attributes:
        said: What each session's agent was answered, turn by turn.
        over: Set when no kill comes any more.
        events: Released whenever a request is sent, and when it is answered.
    """

    def __init__(self, url: str, key: str, http: aiohttp.ClientSession) -> None:
        self.url, self.admin, self.http = url, {"authorization": f"Bearer {key}"}, http
        self.said: dict[str, list[str]] = {}
        self.over = asyncio.Event()
        self.events = asyncio.Semaphore(0)

    async def send(self, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
        """Send a request until it is answered as a whole."""
        while True:
            with contextlib.suppress(*FAILED):
                self.events.release()
                async with self.http.request(method, self.url + path, json=body, headers=headers) as answer:
                    raw = await answer.read()
                    self.events.release()
                    if answer.status != 503 and (not body.get("stream") or raw.endswith(b"data: [DONE]\n\n")):
                        return answer.status, raw
            await asyncio.sleep(0.02)

    async def admin_sends(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        status, raw = await self.send(method, path, body, self.admin)
        return status, orjson.loads(raw)

    async def play(self, agent: int) -> None:
        """Play sessions, one after the other, until no kill comes any more."""
        for number in itertools.count():
            name = f"{agent}-{number}"
            await self.session(name, random.Random(name))
            if self.over.is_set():
                return

    async def session(self, name: str, draw: random.Random) -> None:
        status, opened = await self.admin_sends("POST", "/sessions", {"id": name, "seed": draw.randrange(99)})
        assert status == 200, opened
        history: list[dict[str, Any]] = []
        texts = self.said[name] = []
        for turn in range(TURNS):
            history.append({"role": "user", "content": f"Who manages person {draw.randrange(9)}? ({turn})"})
            body = {"model": "m", "messages": history, "max_tokens": 12, "stream": draw.random() < 0.5}
            status, raw = await self.send("POST", f"{opened['path']}/v1/chat/completions", body, {})
            assert status == 200, raw
            history.append(streamed(raw) if body["stream"] else orjson.loads(raw)["choices"][0]["message"])
            texts.append(history[-1]["content"] or "")
            calls = history[-1].get("tool_calls") or ()
            history += [{"role": "tool", "tool_call_id": call["id"], "content": "none"} for call in calls]
        while not (await self.admin_sends("GET", f"/sessions/{name}", {}))[1]["rewards"]:
            key = {"authorization": f"Bearer {opened['reward_key']}"}
            body = {"value": 1, "turn_id": "t1", "id": "once"}
            status, raw = await self.send("POST", f"/sessions/{name}/rewards", body, key)
            assert status == 200, raw
        status, finalized = await self.admin_sends("POST", f"/sessions/{name}/finalize", {})
        # It ended, and the gateway was killed before it could say so.
        assert status == 200 or (status == 404 and "it ended" in finalized["error"]["message"]), finalized


def streamed(raw: bytes) -> dict[str, Any]:
    """The message of a streamed answer."""
    lines = [orjson.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in line["choices"]]
    calls: dict[int, dict[str, Any]] = {}
    for piece in itertools.chain.from_iterable(delta.get("tool_calls") or () for delta in deltas):
        call = calls.setdefault(piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
        call |= {"id": piece.get("id") or call["id"]}
        for key, text in piece["function"].items():
            call["function"][key] += text or ""
    message = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
    return {**message, "tool_calls": list(calls.values())} if calls else message


async def test_a_gateway_killed_at_random_events_loses_nothing(lookup_model: Path, tmp_path: Path) -> None:
    out, draw = tmp_path / "out", random.Random(5)
    replica = BuiltinReplica(lookup_model, InferenceConfig(), log_file=tmp_path / "server.log")
    await replica.launch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = GatewayConfig(model=lookup_model, out=out, port=port, url=replica.url, seed=1)
    gateway = GatewayProcess(config)
    try:
        await gateway.launch()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            agents = Retrying(gateway.url, gateway.admin_key, http)
            playing = [asyncio.ensure_future(agents.play(number)) for number in range(AGENTS)]
            for _ in range(KILLS):
                agents.events = asyncio.Semaphore(0)
                for _ in range(draw.randint(1, MOST_EVENTS)):
                    await agents.events.acquire()
                await kill(Client(gateway, http))
                await gateway.close()
                gateway = GatewayProcess(config)
                await gateway.launch()
                for agent in playing:
                    assert not agent.done(), agent.exception()
            agents.over.set()
            await asyncio.gather(*playing)
    finally:
        await gateway.close()
        await replica.close()
    trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(out / "trajectories.twz")}
    assert trajectories.keys() == agents.said.keys()
    for name, texts in agents.said.items():
        trajectory = trajectories[name]
        assert (trajectory.stop_reason, trajectory.rewards) == ("completed", [("t1", "reward", 1.0)])
        # Only what was sampled and not answered is sampled once more; what was answered is one branch.
        assert set(trajectory.forks()) <= {"resample", "concurrent"}, trajectory.forks()
        branches = [
            [segment.messages[0]["content"] for segment in trajectory.path(leaf) if segment.sampled]
            for leaf in trajectory.leaves()
        ]
        assert texts in branches, (texts, branches)
    ledger = read_ledger(out / "ledger.jsonl")
    assert max(entry.part for entry in ledger.entries) >= KILLS - 1
    assert sum(len(resumption.lost) for resumption in ledger.resumptions) > KILLS
    assert not any(resumption.abandoned for resumption in ledger.resumptions)
    assert audit_run(out, console=silent()).contradictions == []
    # A turn that is taken out of what is on disk is found.
    longest = max(trajectories.values(), key=lambda trajectory: len(trajectory.segments))
    longest.segments = longest.segments[:-2]
    write_records(
        out / "trajectories.twz", [orjson.loads(trajectory.to_bytes()) for trajectory in trajectories.values()]
    )
    contradictions = audit_run(out, console=silent(), recompute=False).contradictions
    assert any(longest.id in text for text in contradictions), contradictions
