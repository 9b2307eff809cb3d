"""What the benchmarks of the gateway share: the conversation, the upstream, and the gateways as processes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.chat import chat_dir
from harness.http_load import Connection, request
from harness.measure import ROOT
from turnwise.chat.renderer import load_renderer
from turnwise.gateway.config import GatewayConfig
from turnwise.gateway.server import GatewayProcess

QUESTION = "What does line {} of the file do, and who calls it? Answer in one sentence, and name the function."
ANSWER = "It reads the configuration before the server starts, and it is called by the function main of this module."
PEERS = ROOT / ".venv-peers" / "bin" / "python"


def conversation(turn: int) -> bytes:
    """Return the body of the request that asks turn ``turn`` (from 0) of a conversation."""
    messages = [{"role": "system", "content": "You read source code and answer questions about it."}]
    for number in range(turn + 1):
        if number:
            messages.append({"role": "assistant", "content": ANSWER})
        messages.append({"role": "user", "content": QUESTION.format(number)})
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 128}).encode()


def completion() -> list[int]:
    """Return what the model samples at each turn."""
    ids: list[int] = load_renderer(chat_dir()).completion({"role": "assistant", "content": ANSWER}, []).tolist()
    return ids


@asynccontextmanager
async def upstream(prompt_tokens: int) -> AsyncIterator[int]:
    """Run the upstream in a process of its own; yields its port."""
    given = json.dumps({"ids": completion(), "text": ANSWER, "prompt": list(range(prompt_tokens))})
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("upstream.py")), given, stdin=-1, stdout=-1
    )
    try:
        assert process.stdout is not None
        yield int(await asyncio.wait_for(process.stdout.readline(), 30))
    finally:
        process.terminate()
        await process.wait()


@dataclass(slots=True)
class Ours:
    """Our gateway in its process."""

    port: int
    pid: int
    key: str

    async def control(self, path: str, body: dict[str, object], method: str = "POST") -> dict[str, object]:
        """Ask a route of controllers."""
        connection = await Connection.open(self.port)
        headers = f"authorization: Bearer {self.key}\r\n"
        status, raw = await connection.ask(request(path, json.dumps(body).encode(), method=method, headers=headers))
        await connection.close()
        if status != 200:
            raise RuntimeError(f"{path}: status {status}: {raw[:300]!r}")
        answered: dict[str, object] = json.loads(raw)
        return answered

    async def open(self, name: str) -> str:
        """Open a session; returns the path below which it is asked."""
        return str((await self.control("/sessions", {"id": name}))["path"])


@asynccontextmanager
async def ours(upstream_port: int, out: Path, **settings: Any) -> AsyncIterator[Ours]:
    """Run ``turnwise gateway`` over the upstream, with its ledger; ``settings`` are keys of its config."""
    config = GatewayConfig.model_validate(
        {
            "model": chat_dir(),
            "url": f"http://127.0.0.1:{upstream_port}",
            "out": out,
            "port": 0,
            "log_level": "warning",
            **settings,
        }
    )
    process = GatewayProcess(config)
    await process.launch()
    try:
        pid = process.pid
        assert pid is not None
        yield Ours(int(process.url.rsplit(":", 1)[1]), pid, process.admin_key)
    finally:
        await process.close()


@asynccontextmanager
async def rllm(upstream_port: int, python: Path, store: str, out: Path) -> AsyncIterator[int]:
    """Run rLLM's gateway over the upstream, as its command line starts it; yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port), "--store", store]
    command += ["--worker", f"http://127.0.0.1:{upstream_port}/v1", "--log-level", "warning"]
    command += ["--db-path", str(out / "traces.db")] if store == "sqlite" else []
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                connection = await Connection.open(port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            await connection.ask(request("/health", b"", method="GET"))
            await connection.close()
            break
        yield port
    finally:
        process.terminate()
        await process.wait()
