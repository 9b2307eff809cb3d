"""Routing over four replicas: reused prompt tokens and tail latency, against round robin and least-loaded alone.

Four built-in servers (one thread each, a random Qwen3 of 4 layers of 256) serve groups of agent sessions; the cache of
each has room for about half more than its share of what the sessions hold in the end. The sessions of a group begin
with one prompt; each goes on for some turns, in which a tool answers after a time from a Pareto distribution. Lengths
of completions have a long tail (log-normal). Sessions, lengths and times are drawn from seeds, and are the same for all
policies; ids differ between all runs, so that none finds what another one left in a cache.

The sides take turns: ``affinity`` (session, shared prefix, load), ``least_loaded``, ``round_robin``. ``reuse`` is the
share of prompt tokens that were not prefilled, ``p50``, ``p95`` and ``p99`` are seconds of requests, ``cpu_s`` is of
the servers. ``ratio`` is CPU seconds of round robin over those of affinity, ``ratio_least_loaded`` those of
least-loaded over them.

The servers share the cores of this machine, so latencies of the run say more about the machine than about the policy.
``tail`` and ``tail_least_loaded`` are ratios of 95th percentiles of a simulation of the same sessions, in which each
server has its own device (``harness/agent_sessions.py``); its ``busy_s`` is to be compared with ``cpu_s``.

``idle`` is a simulation of 64 such servers and 16 workers with a router each, of 16, 64 and 256 episodes at a time, in
groups of 8; 4,096 episodes (``--quick``: 1,024, and only 16 at a time). Sides: ``one_order``, all workers order equal
servers alike; ``own_order``, each by its number, as workers do; ``shared``, what ships: and servers report their loads
each second; ``one_router`` for all. A request takes half a second, or (``slower``) five; caches have the default size.
``idle_share`` is the share of servers that have nothing to do, over servers and time, at 16 episodes a worker, of what
ships: the larger one of both paces.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from harness.agent_sessions import COSTS, Clients, Session, Simulation, sessions
from harness.measure import cached, machine, parse, parser, report
from turnwise.inference.builtin import forked_servers
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.replica_set import ReplicaSet
from turnwise.inference.routing import RoutingOptions
from turnwise.types import SamplingParams, TokenPrompt

SETTINGS: dict[str, Any] = {
    "replicas": 4,
    "groups": 8,
    "group_size": 4,
    "turns": 5,
    "prompt_tokens": 512,
    "observation_tokens": 256,
    "completion_tokens": {"median": 16, "sigma": 0.7, "most": 96},
    "tool_seconds": {"shape": 1.2, "least": 0.02, "most": 0.5},
    "kv_tokens": 18432,
    "vocabulary": 4096,
    "model": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
QUICK = {"groups": 4, "turns": 3, "kv_tokens": 6144}
SIMULATED = 8
POLICIES = ("affinity", "least_loaded", "round_robin")
SERVERS, WORKERS, SLOWER = 64, 16, 10.0
SIDES = ("one_order", "own_order", "shared", "one_router")


def write_model(directory: Path) -> None:
    """Write a random model, without a tokenizer: requests hold ids."""
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=SETTINGS["vocabulary"], **SETTINGS["model"], **ids)).save_pretrained(
        directory
    )


async def play(
    fleet: ReplicaSet, policy: str, drawn: list[Session], seed: list[int], settings: dict[str, Any]
) -> dict[str, Any]:
    """Play all sessions at once by a policy; return its figures."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> Any:
        return rng.integers(2, settings["vocabulary"], count).astype(np.int32)

    prompts = [ids(settings["prompt_tokens"]) for _ in range(settings["groups"])]
    routing = RoutingOptions(policy=policy, prefix_tokens=settings["kv_tokens"])
    client, latencies = HTTPClient(fleet.client.urls, routing=routing), []

    async def converse(name: str, session: Session) -> None:
        history = prompts[session.group]
        for turn, (tokens, seconds) in enumerate(zip(session.completions, session.tools, strict=True)):
            params = SamplingParams(temperature=1.0, max_tokens=tokens, seed=turn, ignore_eos=True)
            began = time.perf_counter()
            done = await client.generate(TokenPrompt(history), params, session_id=name)
            latencies.append(time.perf_counter() - began)
            history = np.concatenate([history, done.token_ids, ids(settings["observation_tokens"])])
            await asyncio.sleep(seconds)

    before, began = await fleet.stats(), time.perf_counter()
    try:
        # Names of sessions differ between runs, too: servers remember them.
        await asyncio.gather(*(converse(f"{policy}{seed}/{place}", each) for place, each in enumerate(drawn)))
        wall = time.perf_counter() - began
    finally:
        await client.close()
    after = await fleet.stats()
    change = {name: after[name] - before[name] for name in ("reused_tokens", "prefilled_tokens", "cpu_seconds")}
    return {
        "reuse": change["reused_tokens"] / (change["reused_tokens"] + change["prefilled_tokens"]),
        **{f"p{percent}": float(np.percentile(latencies, percent)) for percent in (50, 95, 99)},
        "cpu_s": change["cpu_seconds"],
        "wall_s": wall,
        "moved": client.router.counts.moved,
    }


async def run(config: InferenceConfig, repeats: int, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Measure all policies in turn."""
    samples: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    with tempfile.TemporaryDirectory(prefix="turnwise-bench-") as logs:
        inputs = {"model": settings["model"], "vocabulary": settings["vocabulary"]}
        fleet = ReplicaSet(config, cached("routing-model", inputs, write_model), logs=Path(logs))
        await fleet.launch()
        try:
            warm = {**settings, "groups": 1, "turns": 1}
            await play(fleet, "round_robin", sessions(0, warm), [0], warm)
            for repeat in range(1, repeats + 1):
                drawn = sessions(repeat, settings)
                for policy in POLICIES if repeat % 2 else reversed(POLICIES):
                    seed = [repeat, POLICIES.index(policy)]
                    found = await play(fleet, policy, drawn, seed, settings)
                    samples[policy].append(found)
                    line = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
                    print(f"{policy} {repeat}/{repeats}: {line}", file=sys.stderr, flush=True)
        finally:
            await fleet.close()
    return samples


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=7, quick_repeats=1))
    settings = {**SETTINGS, **(QUICK if arguments.quick else {})}
    servers = {"replicas": settings["replicas"], "kv_tokens": settings["kv_tokens"], "max_context": 3072}
    config = InferenceConfig(device="cpu", **servers)
    with forked_servers([config]):
        samples = asyncio.run(run(config, arguments.repeats, settings))
    idle = asyncio.run(idle_shares(1024, (16,)) if arguments.quick else idle_shares(4096, (16, 64, 256)))
    tell(samples, settings, idle)


async def simulate(settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Simulate some repeats by each policy."""
    repeats = range(1, 1 + SIMULATED)
    return {policy: [await Simulation(policy, each, settings).run() for each in repeats] for policy in POLICIES}


async def idle_shares(episodes: int, at_once: tuple[int, ...]) -> dict[str, dict[str, dict[str, float]]]:
    """Simulate workers with a router each, and one router; return figures by episodes of a worker, pace and side."""
    fleet = {"replicas": SERVERS, "kv_tokens": RoutingOptions().prefix_tokens}
    settings = {**SETTINGS, **fleet, "groups": episodes // 8, "group_size": 8}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    table = Table("episodes", "side", "idle", "reuse", "p50", "p95", "wall_s", "moved", title="workers, simulated")
    for count in at_once:
        for slower, pace in ((1.0, ""), (SLOWER, " slower")):
            sides = figures.setdefault(f"{count}{pace}", {})
            for side in SIDES:
                clients = Clients(WORKERS, count, numbered=side in ("own_order", "shared"), reports=side == "shared")
                if side == "one_router":
                    clients = Clients(1, WORKERS * count)
                played = await Simulation("affinity", 1, settings, clients, slower).run()
                sides[side] = {
                    name: round(played[name], 4) for name in ("idle", "reuse", "p50", "p95", "wall_s", "moved")
                }
                table.add_row(f"{count}{pace}", side, *(f"{figure:.3f}" for figure in sides[side].values()))
    Console(stderr=True, width=100).print(table)
    return figures


def medians_of(samples: dict[str, list[dict[str, Any]]], title: str) -> dict[str, dict[str, float]]:
    """Return the medians of each policy, and print them as a table."""
    found = {
        policy: {name: round(median(each[name] for each in taken), 4) for name in taken[0]}
        for policy, taken in samples.items()
    }
    table = Table("policy", *found["affinity"], title=title)
    for policy, figures in found.items():
        table.add_row(policy, *(f"{figure:.3f}" for figure in figures.values()))
    Console(stderr=True, width=100).print(table)
    return found


def tell(
    samples: dict[str, list[dict[str, Any]]], settings: dict[str, Any], idle: dict[str, dict[str, dict[str, float]]]
) -> None:
    """Print the results, as tables and as JSON."""
    medians = medians_of(samples, "measured")
    simulated = medians_of(asyncio.run(simulate(settings)), "simulated, a device each")

    def over(figures: dict[str, dict[str, float]], peer: str, figure: str) -> float:
        return round(figures[peer][figure] / figures["affinity"][figure], 3)

    report(
        {
            "ratio": over(medians, "round_robin", "cpu_s"),
            "ratio_least_loaded": over(medians, "least_loaded", "cpu_s"),
            "tail": over(simulated, "round_robin", "p95"),
            "tail_least_loaded": over(simulated, "least_loaded", "p95"),
            "idle_share": max(sides["shared"]["idle"] for count, sides in idle.items() if count.split()[0] == "16"),
            "idle": idle,
            **{f"reuse_{policy}": figures["reuse"] for policy, figures in medians.items()},
            "simulated": simulated,
            "medians": medians,
            "config": {**settings, "simulated_costs": COSTS},
            "machine": machine("turnwise-rl", "torch", "transformers"),
            "samples": samples,
        }
    )


if __name__ == "__main__":
    main()
