"""What the rollout stack costs on top of vLLM: sampled tokens a second through it, over those of raw requests.

64 episodes at once on one vLLM server for CPUs, of several turns each: the environment answers every message. *Ours* is
the whole stack as training uses it: environments, an agent, sessions with their renderer and records, trajectories, and
the HTTP client. *Raw* repeats the last pass of ours with a loop over one pooled aiohttp session: it sends the ids
of the same first prompts, appends what it was answered and the ids that stood between two turns, and reads nothing but
the ids. Its completions have the lengths that ours had, and requests the same parameters, so the server does the same
for both. The prefix cache is emptied before each pass.

``ratio`` is ours over raw, in tokens by wall second, the median over the pairs of passes; the bar is 0.95.
``ratio_cpu`` is the same in tokens by CPU second of client and server, which other work on the machine moves less. The
model is SmolLM2-135M-Instruct in float32 (``harness/smollm2.py``). Starting vLLM is not measured. ``--quick`` takes one
pair of passes of 2 turns of 4 tokens.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from harness.measure import ROOT, Sample, machine, measured, median, parse, parser, report, spread
from harness.smollm2 import add_arguments, base_model
from turnwise import Env, RolloutConfig, RolloutProducer, RolloutRequest, StepResult, Task
from turnwise.agents import Agent, Episode, register_agent
from turnwise.chat.renderer import load_renderer
from turnwise.envs import register
from turnwise.envs.core import as_messages
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.guard.turnwise_guard import CONTROL_KEY, control_key
from turnwise.inference.replica import ControlRoutes
from turnwise.inference.vllm import VLLMReplica, find_install
from turnwise.inference.wire import encode_request
from turnwise.model.core import Renderer
from turnwise.rollout.core import RolloutParts
from turnwise.types import Completion, Message, SamplingParams, TokenIds, TokenPrompt

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
EPISODES = 64
THREADS = 2
BAR = 0.95


class Listening(Env):
    """Answers each message, and ends after some."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        del seed
        self._heard = 0
        return ("" if task is None else str(task.prompt)), {}

    def step(self, action: Message) -> StepResult:
        del action
        self._heard += 1
        return StepResult(f"That was message {self._heard}. And then?", 0.0, self._heard == self._turns, False, {})

    def score(self, final: Message | None) -> float:
        del final
        return 1.0


class Talking(Agent):
    """Says something until the environment ends; completions that were cut off are messages like others."""

    offers_tools = False

    async def run(self, episode: Episode) -> None:
        messages = list(episode.observation)
        while True:
            message = await episode.session.chat(messages)
            result = await episode.step(message)
            if result.terminated:
                return
            messages += [message, *as_messages(result.observation)]


register("benchmark_listening", Listening)
register_agent("benchmark_talking")(Talking)


class Recording(HTTPClient):
    """Keeps what each session asked and was answered."""

    def __init__(self, url: str) -> None:
        super().__init__([url])
        self.asked: defaultdict[str, list[tuple[TokenIds, TokenIds, SamplingParams]]] = defaultdict(list)

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        done = await super().generate(prompt, params, session_id=session_id)
        self.asked[session_id].append((prompt.token_ids, done.token_ids, params))
        return done


class Turn:
    """The ids that a turn adds to what came before, and how it is sampled: to the length that ours had."""

    def __init__(self, added: TokenIds, params: SamplingParams) -> None:
        self.added, self.params = added, params


def turns_of(calls: list[tuple[TokenIds, TokenIds, SamplingParams]]) -> list[Turn]:
    """Return the turns of a session; fail unless each prompt goes on from the one before, id by id."""
    turns, context = [], np.zeros(0, np.int32)
    for prompt, completion, params in calls:
        if not np.array_equal(prompt[: len(context)], context):
            raise SystemExit("a prompt does not go on from the turn before it")
        exact = replace(params, max_tokens=len(completion), ignore_eos=True)
        turns.append(Turn(prompt[len(context) :], exact))
        context = np.concatenate([prompt, completion])
    return turns


class Bench:
    """A running server, and the two sides that ask it."""

    def __init__(self, url: str, renderer: Renderer, turns: int, new: int) -> None:
        self._url, self._renderer, self._turns, self._new = url, renderer, turns, new
        self._control = ControlRoutes(control_key())
        self.plan: list[list[Turn]] = []

    async def _empty_cache(self) -> None:
        await self._control.request(self._url, "POST", "/reset_prefix_cache")

    async def ours(self) -> Sample:
        """Play all episodes."""
        config = RolloutConfig.model_validate(
            {
                "env": {"name": "benchmark_listening", "config": {"turns": self._turns}},
                "agent": {"name": "benchmark_talking"},
                "concurrency": EPISODES,
                "group_size": 1,
                "max_turns": self._turns + 1,
                "max_tokens_per_turn": self._new,
            }
        )
        await self._empty_cache()
        client = Recording(self._url)
        producer = await RolloutProducer.create(config, client, None, RolloutParts(self._renderer))
        requests = [RolloutRequest(Task(f"task{n}", f"Tell me story number {n}.", {})) for n in range(EPISODES)]
        try:
            with measured() as sample:
                groups = await producer.gather(requests)
        finally:
            await producer.close()
            await client.close()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        unplanned = [
            trajectory
            for trajectory in trajectories
            if trajectory.error is not None
            or (trajectory.metrics["turns"], trajectory.metrics["forks"]) != (self._turns, 0)
        ]
        if unplanned or len(trajectories) != EPISODES:
            raise SystemExit(
                f"{len(trajectories)} trajectories, {len(unplanned)} of them not as planned: {unplanned[:1]}"
            )
        self.plan = [turns_of(calls) for calls in client.asked.values()]
        return self._counted(sample, sum(len(ids) for calls in client.asked.values() for _, ids, _ in calls))

    async def raw(self) -> Sample:
        """Ask for the same, without anything of the stack."""
        await self._empty_cache()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=EPISODES)) as session:
            with measured() as sample:
                counts = await asyncio.gather(*(self._chain(session, turns) for turns in self.plan))
        return self._counted(sample, sum(counts))

    async def _chain(self, session: aiohttp.ClientSession, turns: list[Turn]) -> int:
        token_ids, count = np.zeros(0, np.int32), 0
        headers = {"Content-Type": "application/json"}
        for turn in turns:
            token_ids = np.concatenate([token_ids, turn.added])
            body = encode_request(token_ids, turn.params)
            async with session.post(f"{self._url}/inference/v1/generate", data=body, headers=headers) as answer:
                answer.raise_for_status()
                sampled = orjson.loads(await answer.read())["choices"][0]["token_ids"]
            token_ids = np.concatenate([token_ids, np.array(sampled, np.int32)])
            count += len(sampled)
        return count

    def _counted(self, sample: Sample, count: int) -> Sample:
        planned = sum(turn.params.max_tokens or 0 for turns in self.plan for turn in turns)
        if count != planned or len(self.plan) != EPISODES:
            raise SystemExit(f"{count} ids were sampled in {len(self.plan)} episodes, not {planned} in {EPISODES}")
        sample.values |= {"tokens": count, "tokens_per_s": count / sample.wall_s}
        return sample

    async def close(self) -> None:
        """Close the connections."""
        await self._control.close()


@asynccontextmanager
async def served(model: Path, config: InferenceConfig) -> AsyncIterator[VLLMReplica]:
    """Start vLLM, and stop it at the end."""
    log = Path(tempfile.mkdtemp(prefix="turnwise-bench-")) / "vllm.log"
    os.environ.setdefault(CONTROL_KEY, "benchmark")
    replica = VLLMReplica(model, config, log_file=log)
    start = time.perf_counter()
    await replica.launch()
    print(f"vLLM started in {time.perf_counter() - start:.0f} s (not measured)", file=sys.stderr, flush=True)
    try:
        yield replica
    finally:
        await replica.close()


async def run(model: Path, config: InferenceConfig, turns: int, new: int, repeats: int) -> dict[str, Any]:
    """Measure both sides in turn."""
    renderer = load_renderer(model)
    samples: dict[str, list[Sample]] = {"ours": [], "raw": []}
    async with served(model, config) as replica:
        bench = Bench(replica.url, renderer, turns, new)
        try:
            # Not counted: the first requests of a server are slow.
            await bench.ours()
            for repeat in range(1, repeats + 1):
                sides = {"ours": bench.ours, "raw": bench.raw}
                for name in sides if repeat % 2 else reversed(sides):
                    there = await replica.cpu_seconds()
                    sample = await sides[name]()
                    sample.values["server_cpu_s"] = await replica.cpu_seconds() - there
                    samples[name].append(sample)
                    rate = sample.values["tokens_per_s"]
                    line = f"{name} {repeat}/{repeats}: {rate:.1f} tokens/s, {sample.cpu_s:.2f} CPU-s of the client"
                    print(line, file=sys.stderr, flush=True)
        finally:
            await bench.close()
    install = await find_install(config.server)
    return result(samples, model, config, turns, new, install.version)


def result(
    samples: dict[str, list[Sample]], model: Path, config: InferenceConfig, turns: int, new: int, vllm: str
) -> dict[str, Any]:
    """Print a table for people; return what is reported."""
    rates = {name: median(passes, "tokens_per_s") for name, passes in samples.items()}
    # Each pass by the one beside it: a machine whose speed drifts slows both.
    pairs = [
        ours.values["tokens_per_s"] / raw.values["tokens_per_s"]
        for ours, raw in zip(samples["ours"], samples["raw"], strict=True)
    ]
    per_cpu = {
        name: statistics.median(
            sample.values["tokens"] / (sample.cpu_s + sample.values["server_cpu_s"]) for sample in passes
        )
        for name, passes in samples.items()
    }
    # In the client's process alone.
    per_turn = {name: median(passes) / (EPISODES * turns) * 1e3 for name, passes in samples.items()}
    table = Table(
        "side",
        "tokens/s",
        "tokens/CPU-s",
        "ms of CPU a turn, client",
        title=f"vllm_overhead: {EPISODES} x {turns} x {new}",
    )
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.1f}", f"{per_cpu[name]:.1f}", f"{per_turn[name]:.2f}")
    Console(stderr=True).print(table)
    ratio = statistics.median(pairs)
    return {
        "ratio": round(ratio, 3),
        "ratio_cpu": round(per_cpu["ours"] / per_cpu["raw"], 3),
        "bar": BAR,
        "held": ratio >= BAR,
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "tokens_per_cpu_s": {name: round(rate, 1) for name, rate in per_cpu.items()},
        "client_ms_per_turn": {name: round(milliseconds, 3) for name, milliseconds in per_turn.items()},
        "config": {
            "episodes": EPISODES,
            "turns": turns,
            "tokens_per_turn": new,
            "model": model.name,
            "vllm": vllm,
            "ours": {"agent": "session.chat and step in turn", "group_size": 1, "concurrency": EPISODES},
            "raw": {"client": "aiohttp", "route": "/inference/v1/generate", "concurrency": EPISODES},
            "server": config.model_dump(mode="json", include={"dtype", "threads", "max_seqs", "max_batch_tokens"}),
            "repeats": len(samples["ours"]),
        },
        "machine": machine("turnwise-rl", "torch", "transformers", "aiohttp", "uvloop", "orjson", "numpy"),
        "tokens_per_s_samples": {
            name: [round(sample.values["tokens_per_s"], 1) for sample in passes] for name, passes in samples.items()
        },
        "samples": spread(samples),
    }


def main() -> None:
    argument_parser = parser(__doc__ or "", repeats=3, quick_repeats=1)
    add_arguments(argument_parser)
    argument_parser.add_argument(
        "--vllm-python", type=Path, default=VLLM_PYTHON, metavar="PATH", help="a Python that has vLLM"
    )
    arguments = parse(argument_parser)
    if not arguments.vllm_python.exists():
        raise SystemExit(f"--vllm-python is {arguments.vllm_python}, which does not exist: name a Python that has vLLM")
    model = base_model(arguments)
    config = InferenceConfig.model_validate(
        {
            "engine": "vllm",
            "dtype": "float32",
            "kv_tokens": 65536,
            "threads": THREADS,
            "server": {"python": arguments.vllm_python},
        }
    )
    turns, new = (2, 4) if arguments.quick else (4, 16)
    report(uvloop.run(run(model.absolute(), config, turns, new, arguments.repeats)))


if __name__ == "__main__":
    main()
