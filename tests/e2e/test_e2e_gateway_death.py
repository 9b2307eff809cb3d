"""A gateway in a process of its own is killed: every session that had ended is kept, and it goes on where it was."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.crash.moments import MID_GENERATION, MID_JOURNAL, MID_TOOL, RESET
from support.trainer.lookup_run import silent
from turnwise.gateway.config import GatewayConfig
from turnwise.gateway.server import GatewayProcess
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.config import InferenceConfig
from turnwise.rollout.records import read_trajectories
from turnwise.trainer.observe.audit import audit_run

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


async def test_a_gateway_that_is_killed_keeps_every_session_that_had_ended(lookup_model: Path, tmp_path: Path) -> None:
    out, file, ended = tmp_path / "out", tmp_path / "out" / "trajectories.jsonl", list[str]()
    replica = BuiltinReplica(lookup_model, InferenceConfig(), log_file=tmp_path / "server.log")
    await replica.launch()
    try:
        for moment in (RESET, MID_TOOL, MID_GENERATION, MID_JOURNAL):
            async with gateway_at(lookup_model, out, replica.url) as client:
                ended.append(f"ended before {moment}")
                path = await client.open(ended[-1])
                await client.post(path, ASK)
                await client.end(ended[-1])
                await at(moment, client, replica)
            assert [each.id for each in read_trajectories(file)] == ended
            assert audit_run(out, console=silent()).contradictions == []
        # What a kill leaves of a line that is being written, which may end like a whole one.
        whole = file.read_bytes()
        torn = whole.splitlines()[-1].partition(b"}")[0] + b"}"
        file.write_bytes(whole + torn)
        async with gateway_at(lookup_model, out, replica.url) as client:
            path = await client.open("the last")
            await client.post(path, ASK)
            await client.end("the last")
    finally:
        await replica.close()
    assert [each.id for each in read_trajectories(file)] == [*ended, "the last"]
    assert audit_run(out, console=silent()).contradictions == []
