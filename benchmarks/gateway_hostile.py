"""One client sends what hurts most; how long do the others wait?

``turnwise gateway`` at its default limits, with a context of 131,072 tokens (``small``: 8,192), over an upstream that
answers at once. While one session sends an offending request, another session asks its turns, and a third
connection asks for ``/health``, each again as soon as it is answered. Offending requests: a message of 30 MB; 12 MB of
blanks; and, within the body limit, prose, blanks, one word without end, calls with large arguments, tools with large
descriptions, 150,000 messages of a few letters, and a request to count the tokens of prose.

A flooding program (``yes``, as a black-box agent and as a persistent worker) is started at the default output limit in
an event loop as of a rollout, which serves the programs' gateway too; there, what others wait is how late the loop
calls what is due every 2 ms.

``ms_p99``: the 99th percentile of the latencies of ``/health`` and of the honest session's turns, over all offences, in
milliseconds; ``ms_max`` the largest. ``mb_kept``: what the gateway's resident memory grew by, from before the first to
after the last offence. The script fails unless each offence is answered with the status that is expected of it, with an
error that names the cause. No peer is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from gateway_sessions import resident
from rich.console import Console
from rich.table import Table

from harness.gateways import Ours, conversation, ours, upstream
from harness.http_load import Connection, request
from harness.measure import machine, parse, parser, report
from turnwise.ext.programs.config import BlackBoxConfig
from turnwise.ext.programs.program import Program, Worker

CONTEXTS = {"large": 131_072, "small": 8_192}
BARS = {"ms_p99": 250.0, "mb_kept": 100.0}
LIMIT = 8 * 2**20 - 1024
SENTENCE = "The quick brown fox jumps over 13 lazy dogs; then it naps.\n"


@dataclass(frozen=True, slots=True)
class Offence:
    """A request that hurts: its body, the statuses that it may have, a word of its error, and its route."""

    body: bytes
    statuses: tuple[int, ...]
    word: str
    route: str = "chat/completions"


def said(text: str, **more: Any) -> bytes:
    """Return the body of a request with one message."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 16, **more}
    return json.dumps(body).encode()


def prose(size: int) -> str:
    """Return prose of so many bytes as JSON."""
    line = len(json.dumps(SENTENCE)) - 2
    return SENTENCE * (size // line)


def offences() -> dict[str, Offence]:
    """Return all offences by name."""
    fits = LIMIT - 2000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "y" * (fits // 3)})}}
    answered = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "d"}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": prose(fits), "parameters": {"type": "object"}}}
    many = [{"role": "user", "content": f"m{number}"} for number in range(150_000)]
    too_long = ((400,), "too long")
    return {
        "30 MB": Offence(said(prose(30_000_000)), (413,), "bytes"),
        "12 MB of blanks": Offence(said(" " * 12_000_000), (413,), "bytes"),
        "prose": Offence(said(prose(fits)), *too_long),
        "blanks": Offence(said(" " * fits), (400,), ""),
        "one word": Offence(said("a" * fits), (400,), ""),
        "arguments": Offence(json.dumps({"model": "m", "messages": answered}).encode(), (400,), ""),
        "tools": Offence(said("Go.", tools=[tool]), *too_long),
        "many messages": Offence(json.dumps({"model": "m", "messages": many}).encode(), (400, 413), ""),
        "count": Offence(said(prose(fits)), (200,), "input_tokens", "messages/count_tokens"),
    }


def offend(port: int, message: bytes) -> tuple[int, bytes]:
    """Send a request over a blocking socket and return its answer; the rest is not sent once it is answered."""
    with socket.create_connection(("127.0.0.1", port)) as wire:
        with contextlib.suppress(OSError):  # It may be refused by its head.
            wire.sendall(message)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := wire.recv(65536):
                answer += chunk
                head, separator, body = answer.partition(b"\r\n\r\n")
                if separator and len(body) >= int(head.lower().split(b"content-length:")[1].split(b"\r")[0]):
                    break
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head[9:12] or b"0"), body


async def probe(connection: Connection, messages: list[bytes], done: asyncio.Event) -> list[float]:
    """Ask one thing after the other until an offence is answered; return the latencies in seconds."""
    latencies: list[float] = []
    while not done.is_set():
        start = time.perf_counter()
        status, body = await connection.ask(messages[len(latencies) % len(messages)])
        latencies.append(time.perf_counter() - start)
        if status != 200:
            raise SystemExit(f"an honest request: status {status}: {body[:300]!r}")
        await asyncio.sleep(0.002)
    return latencies


async def commit(gateway: Ours, name: str, offence: Offence, turns: int) -> tuple[list[float], float]:
    """Send one offence beside honest clients; return their latencies, and the seconds it took."""
    honest, offender = await gateway.open(f"honest-{name}"), await gateway.open(f"bad-{name}")
    health, asker = await Connection.open(gateway.port), await Connection.open(gateway.port)
    messages = [request(f"{honest}/v1/chat/completions", conversation(turn)) for turn in range(turns)]
    done = asyncio.Event()
    probes = [
        asyncio.ensure_future(probe(health, [request("/health", b"", method="GET")], done)),
        asyncio.ensure_future(probe(asker, messages, done)),
    ]
    await asyncio.sleep(0.05)
    start = time.perf_counter()
    message = request(f"{offender}/v1/{offence.route}", offence.body, headers="connection: close\r\n")
    status, body = await asyncio.to_thread(offend, gateway.port, message)
    seconds = time.perf_counter() - start
    await asyncio.sleep(0.05)
    done.set()
    latencies = [latency for of_probe in await asyncio.gather(*probes) for latency in of_probe]
    if status not in offence.statuses or offence.word.encode() not in body:
        raise SystemExit(f"{name}: status {status}: {body[:500]!r}")
    for connection in (health, asker):
        await connection.close()
    for session in (f"honest-{name}", f"bad-{name}"):
        await gateway.control(f"/sessions/{session}/abort", {})
    return latencies, seconds


async def flood(lines: bool) -> tuple[list[float], float, float]:
    """Run a flooding program; return the lateness of the event loop in seconds, the seconds it took, and MB kept."""
    limit = BlackBoxConfig.model_fields["output_limit"].default
    worker = Worker()
    resident_before = resident(os.getpid())
    start = time.perf_counter()
    late: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        program = await Program.start(
            ["yes"],
            env={"PATH": os.environ["PATH"]},
            cwd=Path(folder),
            output_limit=limit,
            on_line=worker.receive if lines else None,
        )
        program_end = asyncio.ensure_future(program.wait())
        while not program_end.done():
            due = time.perf_counter() + 0.002
            await asyncio.sleep(0.002)
            late.append(max(0.0, time.perf_counter() - due))
        outcome = await program.end()
    if not outcome.flooded:
        raise SystemExit(f"the flood was not ended: {outcome.status}, {outcome.stdout.size} bytes")
    return late, time.perf_counter() - start, (resident(os.getpid()) - resident_before) / 1e6


def percentile(latencies: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    ordered = sorted(latencies)
    return 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


async def measure(repeats: int) -> dict[str, Any]:
    rows: dict[str, list[float]] = {}
    worst: dict[str, float] = {}
    megabytes: list[float] = []
    for repeat in range(repeats):
        for label, context in CONTEXTS.items():
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out"
                async with upstream(1) as port, ours(port, out, context_length=context) as gateway:
                    await commit(gateway, "warm", Offence(said(prose(200_000)), (200, 400), ""), 20)
                    resident_before = resident(gateway.pid)
                    for name, offence in offences().items():
                        latencies, seconds = await commit(gateway, f"{name} {repeat}".replace(" ", "-"), offence, 20)
                        key = f"{label}: {name}"
                        rows.setdefault(key, []).extend(latencies)
                        worst[key] = max(worst.get(key, 0.0), seconds)
                        waited = f"p99 {percentile(latencies):.0f} ms, max {1e3 * max(latencies):.0f} ms"
                        print(f"{key}: {waited}, {seconds:.2f} s", file=sys.stderr, flush=True)
                    # Memory is given back behind the last answer.
                    await asyncio.sleep(2)
                    megabytes.append((resident(gateway.pid) - resident_before) / 1e6)
        for key, lines in (("flooding program", False), ("flooding worker", True)):
            late, seconds, growth = await flood(lines)
            rows.setdefault(key, []).extend(late)
            worst[key] = max(worst.get(key, 0.0), seconds)
            megabytes.append(growth)
    every = [latency for latencies in rows.values() for latency in latencies]
    figures = {"ms_p99": round(percentile(every), 1), "mb_kept": round(max(megabytes), 1)}
    table = Table(title="what others wait beside an offending request")
    for column in ("request", "p99 ms", "max ms", "answered after s"):
        table.add_column(column, justify="left" if column == "request" else "right")
    for key, latencies in rows.items():
        table.add_row(key, f"{percentile(latencies):.0f}", f"{1e3 * max(latencies):.0f}", f"{worst[key]:.2f}")
    Console(stderr=True).print(table)
    return {
        **figures,
        "ms_max": round(1e3 * max(every), 1),
        "bars": BARS,
        "held": {key: value <= BARS[key] for key, value in figures.items()},
        "by_request": {
            key: {"ms_p99": round(percentile(latencies), 1), "ms_max": round(1e3 * max(latencies), 1)}
            for key, latencies in rows.items()
        },
        "config": {"contexts": CONTEXTS, "body_bytes": LIMIT + 1024, "repeats": repeats},
        "machine": machine("turnwise-rl", "tokenizers", "uvicorn", "uvloop", "orjson"),
    }


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=3, quick_repeats=1))
    report(uvloop.run(measure(arguments.repeats)))


if __name__ == "__main__":
    sys.exit(main())
