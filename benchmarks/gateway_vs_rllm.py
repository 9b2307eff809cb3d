"""Requests a second through our gateway and through rLLM's, over the same upstream.

Agents on 1 and on 32 connections each hold conversations of eight turns (Chat Completions, no stream). The upstream is
one process that answers at once with a completion that was made before; what is left is the gateway. Ours is ``turnwise
gateway`` with its ledger on disk: it matches each request with the session's tree, encodes what is new, asks the
upstream for ids, parses and records them. The peer is ``rllm-model-gateway`` as its command line starts it, with
``uvicorn[standard]`` beside it: it forwards the conversation and keeps the trace of each call in memory (``--store
memory``, the faster of its two). The load generator writes requests that were encoded before and is the same for both;
its own ceiling is what it reaches on the upstream without a gateway, and what a gateway adds is the difference of the
medians at one connection.

The script fails unless every request was answered with the upstream's completion, our sessions hold one branch of eight
turns each, and rLLM's hold eight traces each with the completion's ids.

What differs and could not be removed: rLLM's upstream is asked for chat completions, renders nothing itself and would
have its vLLM encode each conversation anew; ours is asked for ids.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from harness.gateways import ANSWER, PEERS, Ours, completion, conversation, ours, rllm, upstream
from harness.http_load import Connection, Load, load, request
from harness.measure import machine, parse, parser, report
from turnwise.trajectory import Trajectory

TURNS = 8
CONNECTIONS = (1, 32)
BARS = {"ratio_c1": 3.0, "ratio_c32": 3.0, "added_p50_ms": 0.6}


async def run_ours(gateway: Ours, name: str, connections: int, count: int) -> Load:
    """Send conversations through our gateway, and check what was recorded of one per connection."""
    paths = [[await gateway.open(f"{name}-{one}-{number}") for number in range(count)] for one in range(connections)]
    bodies = [conversation(turn) for turn in range(TURNS)]
    messages = [[request(f"{path}/v1/chat/completions", body) for path in own for body in bodies] for own in paths]
    taken = await load(gateway.port, messages)
    for one in range(connections):
        for number in range(count):
            session = f"{name}-{one}-{number}"
            if number:
                await gateway.control(f"/sessions/{session}/abort", {})
                continue
            ended = await gateway.control(f"/sessions/{session}/finalize", {})
            trajectory = Trajectory.from_bytes(json.dumps(ended["trajectory"]))
            sampled = [segment.token_ids.tolist() for segment in trajectory.segments if segment.sampled]
            if sampled != [completion()] * TURNS or len(trajectory.leaves()) != 1:
                raise SystemExit(f"session {session} holds {len(sampled)} turns in {len(trajectory.leaves())} branches")
    return taken


async def run_rllm(port: int, name: str, connections: int, count: int) -> Load:
    """Send the same conversations through rLLM's gateway, and check one session's traces per connection."""
    bodies = [conversation(turn) for turn in range(TURNS)]
    messages = [
        [request(f"/sessions/{name}-{one}-{n}/v1/chat/completions", body) for n in range(count) for body in bodies]
        for one in range(connections)
    ]
    taken = await load(port, messages)
    connection = await Connection.open(port)
    for one in range(connections):
        status, raw = await connection.ask(request(f"/sessions/{name}-{one}-0/traces", b"", method="GET"))
        traces = json.loads(raw)
        if status != 200 or [trace["completion_token_ids"] for trace in traces] != [completion()] * TURNS:
            raise SystemExit(f"rLLM's session {name}-{one}-0 holds {len(traces)} traces, not {TURNS} of the completion")
        for n in range(count):
            await connection.ask(request(f"/sessions/{name}-{one}-{n}", b"", method="DELETE"))
    await connection.close()
    return taken


async def run_direct(port: int, connections: int, count: int) -> Load:
    """Send the same requests to the upstream itself: the load generator's own ceiling."""
    bodies = [request("/v1/chat/completions", conversation(turn)) for turn in range(TURNS)]
    return await load(port, [bodies * count] * connections)


async def check_answers(port: int, path: str) -> None:
    """Fail unless an answer says what the upstream said."""
    connection = await Connection.open(port)
    status, raw = await connection.ask(request(f"{path}/v1/chat/completions", conversation(0)))
    await connection.close()
    said = json.loads(raw)["choices"][0]["message"]["content"] if status == 200 else raw
    if said != ANSWER:
        raise SystemExit(f"{path} answered {said!r}")


async def measure(arguments: Namespace) -> dict[str, Any]:
    requests = 400 if arguments.quick else 2400
    found: dict[str, list[float]] = {}

    def note(side: str, connections: int, taken: Load) -> None:
        found.setdefault(f"{side}_c{connections}", []).append(taken.per_second)
        found.setdefault(f"{side}_p50_ms_c{connections}", []).append(taken.p50 * 1e3)
        line = f"{side} c{connections}: {taken.per_second:.0f} requests/s, median {taken.p50 * 1e3:.3f} ms"
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        async with (
            upstream(400) as port,
            ours(port, Path(folder) / "ours") as mine,
            rllm(port, arguments.peers, "memory", Path(folder)) as theirs,
        ):
            await check_answers(mine.port, await mine.open("check"))
            await check_answers(theirs, "/sessions/check")
            for repeat in range(-1, arguments.repeats):
                for connections in CONNECTIONS:
                    # The first round warms up and is not counted.
                    count = max(1, (requests if repeat >= 0 else 200) // TURNS // connections)
                    name = f"r{repeat}c{connections}"
                    sides = [
                        ("direct", lambda count=count, c=connections: run_direct(port, c, count)),
                        ("ours", lambda count=count, c=connections, n=name: run_ours(mine, n, c, count)),
                        ("rllm", lambda count=count, c=connections, n=name: run_rllm(theirs, n, c, count)),
                    ]
                    for side, run in sides if repeat % 2 else reversed(sides):
                        taken = await run()
                        if repeat >= 0:
                            note(side, connections, taken)
    return result(found, arguments.repeats)


def result(found: dict[str, list[float]], repeats: int) -> dict[str, Any]:
    middle = {key: statistics.median(values) for key, values in found.items()}
    table = Table(title=f"conversations of {TURNS} turns through a gateway")
    for column in ("side", "requests/s, 1", "requests/s, 32", "median ms, 1", "median ms, 32"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for side in ("direct", "ours", "rllm"):
        rates = [f"{middle[f'{side}_c{c}']:.0f}" for c in CONNECTIONS]
        table.add_row(side, *rates, *(f"{middle[f'{side}_p50_ms_c{c}']:.2f}" for c in CONNECTIONS))
    Console(stderr=True).print(table)
    added = {
        side: [mine - alone for mine, alone in zip(found[f"{side}_p50_ms_c1"], found["direct_p50_ms_c1"], strict=True)]
        for side in ("ours", "rllm")
    }
    figures = {
        **{f"ratio_c{c}": round(middle[f"ours_c{c}"] / middle[f"rllm_c{c}"], 2) for c in CONNECTIONS},
        "added_p50_ms": round(statistics.median(added["ours"]), 3),
    }
    bars = {key: figures[key] <= bar if key == "added_p50_ms" else figures[key] >= bar for key, bar in BARS.items()}
    return {
        **figures,
        "rllm_added_p50_ms": round(statistics.median(added["rllm"]), 3),
        **{f"{key}_per_s": round(middle[key], 1) for side in ("ours", "rllm") for key in (f"{side}_c1", f"{side}_c32")},
        "ceiling_per_s": {f"c{c}": round(middle[f"direct_c{c}"], 1) for c in CONNECTIONS},
        "bars": BARS,
        "held": bars,
        "config": {
            "turns": TURNS,
            "route": "chat/completions",
            "repeats": repeats,
            "ours": "turnwise gateway MODEL --url UPSTREAM --out DIR (defaults; ledger on disk, log_level warning)",
            "rllm": "python -m rllm_model_gateway --store memory --worker UPSTREAM/v1 --log-level warning",
        },
        "machine": machine("turnwise-rl", "uvicorn", "uvloop", "httptools", "orjson", "aiohttp"),
        "samples": {key: [round(value, 3) for value in values] for key, values in found.items()},
    }


def main() -> None:
    made = parser(__doc__ or "", repeats=7, quick_repeats=2)
    made.add_argument("--peers", type=Path, default=PEERS, help="the Python that rllm-model-gateway is installed for")
    arguments = parse(made)
    if not arguments.peers.exists():
        made.error(f"--peers {arguments.peers} does not exist: `make .venv-peers/.turnwise-installed` builds it")
    report(uvloop.run(measure(arguments)))


if __name__ == "__main__":
    sys.exit(main())
