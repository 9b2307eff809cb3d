"""A thousand sessions at the same time through our gateway: no error, little memory, no slower at the end.

1,000 sessions of 20 turns each (Chat Completions, no stream), each over a connection of its own; all ask their first
turn at the same time, then all their second, and so on, so that every turn meets the same load. The upstream is one
process that answers at once with a completion that was made before. The gateway is ``turnwise gateway`` with its ledger
on disk.

``last_over_first``: the median latency of the last turn over that of the first. ``kb_per_session``: what the gateway's
resident memory grew by from before the sessions to after their last turn, less their messages (as JSON) and tokens (ids
and log-probabilities, four bytes each), by session. Before that, the connections were opened and as many requests were
in flight at once, of a few sessions that were ended: what a process keeps for each request in flight, to agents and to
the upstream, is there with or without sessions and not counted.

The script fails unless every request was answered with the upstream's completion, and every session holds one branch of
20 turns. No peer is measured.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from harness.gateways import ANSWER, Ours, completion, conversation, ours, upstream
from harness.http_load import Connection, request
from harness.measure import machine, parse, parser, report

TURNS = 20
IN_FLIGHT = 25
BARS = {"last_over_first": 1.5, "kb_per_session": 60.0}


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


async def ask_all(connections: list[Connection], messages: list[bytes]) -> list[float]:
    """Ask one turn of all sessions at the same time; return their latencies in seconds."""

    async def ask(connection: Connection, message: bytes) -> float:
        begun = time.perf_counter()
        status, body = await connection.ask(message)
        taken = time.perf_counter() - begun
        if status != 200 or json.loads(body)["choices"][0]["message"]["content"] != ANSWER:
            raise SystemExit(f"status {status}: {body[:500]!r}")
        return taken

    return await asyncio.gather(*map(ask, connections, messages))


async def warm(gateway: Ours, connections: list[Connection]) -> None:
    """Have as many requests in flight as there will be, of the size of the last turn; nothing of them stays."""
    names = [f"warm-{number}" for number in range(-(-len(connections) // IN_FLIGHT))]
    paths = [await gateway.open(name) for name in names]
    body = conversation(TURNS - 1)
    for _ in range(2):
        await ask_all(
            connections,
            [request(f"{paths[n // IN_FLIGHT]}/v1/chat/completions", body) for n in range(len(connections))],
        )
    for name in names:
        await gateway.control(f"/sessions/{name}/abort", {})


async def hold(gateway: Ours, count: int) -> tuple[list[float], int]:
    """Hold all sessions; return the median latency of each turn, and what resident memory grew by."""
    connections = [await Connection.open(gateway.port) for _ in range(count)]
    await warm(gateway, connections)
    before = resident(gateway.pid)
    paths = [await gateway.open(f"held-{number}") for number in range(count)]
    medians = []
    for turn in range(TURNS):
        body = conversation(turn)
        messages = [request(f"{path}/v1/chat/completions", body) for path in paths]
        medians.append(statistics.median(await ask_all(connections, messages)))
    grown = resident(gateway.pid) - before
    for connection in connections:
        await connection.close()
    for number in range(count):
        state = await gateway.control(f"/sessions/held-{number}", {}, "GET")
        metrics: Any = state["metrics"]
        if (metrics["turns"], metrics["branches"], metrics["forks"]) != (TURNS, 1, 0):
            raise SystemExit(f"session held-{number} holds {metrics}")
    return medians, grown


async def payload(gateway: Ours) -> int:
    """Return the bytes of one session's messages and tokens."""
    path = await gateway.open("payload")
    connection = await Connection.open(gateway.port)
    for turn in range(TURNS):
        _, raw = await connection.ask(request(f"{path}/v1/chat/completions", conversation(turn)))
    await connection.close()
    await gateway.control("/sessions/payload/abort", {})
    usage = json.loads(raw)["usage"]
    return len(conversation(TURNS)) + 4 * usage["total_tokens"] + 4 * TURNS * len(completion())


async def measure(count: int, repeats: int) -> dict[str, Any]:
    ratios, sizes, every = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            # A process of its own each time: memory that was freed would hide what the next sessions take.
            async with upstream(1) as port, ours(port, Path(folder) / str(repeat)) as gateway:
                own = await payload(gateway)
                medians, grown = await hold(gateway, count)
            every.append([round(each * 1e3, 1) for each in medians])
            ratios.append(medians[-1] / medians[0])
            sizes.append((grown - count * own) / count / 1000)
            line = (
                f"{repeat + 1}/{repeats}: last/first {ratios[-1]:.2f}, {sizes[-1]:.1f} kB a session beyond {own} bytes"
            )
            print(line, file=sys.stderr, flush=True)
    figures = {
        "last_over_first": round(statistics.median(ratios), 3),
        "kb_per_session": round(statistics.median(sizes), 1),
    }
    table = Table(title=f"{count} sessions of {TURNS} turns at the same time")
    for column in ("figure", "measured", "at most"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for key, value in figures.items():
        table.add_row(key, str(value), str(BARS[key]))
    Console(stderr=True).print(table)
    return {
        **figures,
        "payload_bytes": own,
        "errors": 0,
        "bars": BARS,
        "held": {key: value <= BARS[key] for key, value in figures.items()},
        "config": {"sessions": count, "turns": TURNS, "route": "chat/completions", "repeats": repeats},
        "machine": machine("turnwise-rl", "uvicorn", "uvloop", "orjson", "numpy"),
        "samples": {"last_over_first": ratios, "kb_per_session": sizes, "median_ms_by_turn": every},
    }


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=3, quick_repeats=1))
    report(uvloop.run(measure(200 if arguments.quick else 1000, arguments.repeats)))


if __name__ == "__main__":
    sys.exit(main())
