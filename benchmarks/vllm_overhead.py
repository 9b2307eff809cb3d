"""What the rollout stack costs a vLLM server: tokens a second of 64 episodes at once over those of raw requests.

A vLLM server for CPUs with SmolLM2-135M-Instruct in float32 (``harness/smollm2.py``) serves both sides in turn. Ours is
the stack of a training run: 64 episodes of the environment below through producer, runner, agent, recorder, renderer
and client; each has up to 4 turns of at most 32 tokens, and the environment answers every message. The raw side then
sends what that rollout sent: the same contexts, as many tokens, one request after the other within an episode, all 64
episodes at once, over ``aiohttp`` with bodies and answers that nothing looks at but for the sampled ids, which are put
before the next context. So both sides have the server prefill and sample exactly as many tokens, with prefixes that it
has cached.

``ratio`` is our sampled tokens per wall second over the raw side's (higher is better, 1 is no overhead at all).
``--quick`` takes one repeat and 2 turns. The server's start is not counted.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import orjson
import psutil
from rich.console import Console
from rich.table import Table

from harness.measure import ROOT, Sample, machine, median, parse, parser, report, spread
from harness.smollm2 import add_arguments, base_model
from turnwise import Env, RolloutConfig, RolloutProducer, RolloutRequest, Task, Trajectory
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.envs import register
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.vllm import VLLMReplica
from turnwise.inference.wire import GENERATE
from turnwise.rollout.core import RolloutParts
from turnwise.types import Message

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
EPISODES, TOKENS = 64, 32
TURNS, QUICK_TURNS = 4, 2
TOPICS = ("a lighthouse", "a market", "a long winter", "two brothers", "an old map", "a railway", "a garden", "a storm")


class StoryEnv(Env):
    """Asks for a story and, after each part of it, for the next one."""

    turns: ClassVar[int] = TURNS

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> Any:  # noqa: ARG002
        self.left = self.turns
        return task.prompt if task is not None else TOPICS[0], {}

    def step(self, action: Message) -> Any:  # noqa: ARG002
        self.left -= 1
        return "Go on with the next sentence, and name the weather in it.", 0.0, self.left == 0, False, {}


register("benchmark_story", StoryEnv)


def main() -> None:
    made = parser(__doc__ or "", repeats=5, quick_repeats=1)
    add_arguments(made)
    made.add_argument("--vllm-python", default=str(VLLM_PYTHON) if VLLM_PYTHON.exists() else None, metavar="PATH")
    arguments = parse(made)
    if arguments.vllm_python is None:
        report({"ratio": None, "reason": "no Python with vLLM was given (--vllm-python PATH)"})
        return
    StoryEnv.turns = QUICK_TURNS if arguments.quick else TURNS
    asyncio.run(run(base_model(arguments), arguments.repeats, arguments.vllm_python))


async def run(model: Path, repeats: int, vllm_python: str) -> None:
    """Measure both sides on one server and report."""
    given = {"engine": "vllm", "dtype": "float32", "max_context": 1024, "threads": os.cpu_count() or 1}
    config = InferenceConfig.model_validate({**given, "vllm": {"python": vllm_python}})
    server = VLLMReplica(model, config, log_file=Path(tempfile.mkdtemp(prefix="turnwise-bench-")) / "vllm.log")
    await server.launch()
    try:
        renderer = load_renderer(model)
        samples: dict[str, list[Sample]] = {"ours": [], "raw": []}
        # The first requests of a server are slower than all others.
        await raw(server.url, await ours(server.url, renderer, "warm-up", samples["ours"]), samples["raw"])
        for side in samples.values():
            side.clear()
        for number in range(repeats):
            done = await ours(server.url, renderer, f"repeat{number}", samples["ours"])
            await raw(server.url, done, samples["raw"])
    finally:
        await server.close()
    rates = {side: median(taken, "tokens_per_s") for side, taken in samples.items()}
    show(samples, rates)
    report(
        {
            "ratio": round(rates["ours"] / rates["raw"], 3),
            "tokens_per_s": {side: round(rate, 1) for side, rate in rates.items()},
            "config": {
                "server": config.model_dump(mode="json", include={"engine", "dtype", "max_context", "threads"}),
                "episodes": EPISODES,
                "turns": StoryEnv.turns,
                "max_tokens_per_turn": TOKENS,
                "raw": "aiohttp, one session, connections without limit",
            },
            "machine": machine("turnwise", "aiohttp", "numpy"),
            "samples": spread(samples),
        }
    )


async def ours(url: str, renderer: TemplateRenderer, name: str, samples: list[Sample]) -> list[Trajectory]:
    """Play the episodes; return their trajectories."""
    config = RolloutConfig.model_validate(
        {
            "env": {"name": "benchmark_story"},
            "concurrency": EPISODES,
            "group_size": 1,
            "max_turns": StoryEnv.turns,
            "max_tokens_per_turn": TOKENS,
            "context_length": 1024,
        }
    )
    client = HTTPClient([url])
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer))
    asked = [Task(f"{name}-{index}", f"Tell me about {TOPICS[index % 8]}, part {index}.") for index in range(EPISODES)]
    begun, spent = time.perf_counter(), cpu_seconds()
    groups = await producer.gather([RolloutRequest(task) for task in asked])
    wall, cpu = time.perf_counter() - begun, cpu_seconds() - spent
    await producer.close()
    await client.close()
    trajectories = [each for group in groups for each in group.trajectories]
    failed = [each.error for each in trajectories if each.error is not None]
    if failed or len(trajectories) != EPISODES:
        raise SystemExit(f"{len(trajectories)} trajectories, {len(failed)} of them failed: {failed[:1]}")
    tokens = sum(len(ids) for each in trajectories for ids, sampled in parts(each) if sampled)
    samples.append(Sample(cpu, wall, {"tokens": tokens, "tokens_per_s": tokens / wall}))
    print(f"ours: {tokens} tokens, {wall:.2f} s, {cpu:.2f} CPU-s", file=sys.stderr, flush=True)
    return trajectories


def parts(trajectory: Trajectory) -> list[tuple[Sequence[int], bool]]:
    """Return the ids of an episode in order, and whether the model sampled them."""
    return [(segment.token_ids.tolist(), segment.kind == "sampled") for segment in trajectory.segments]


async def raw(url: str, trajectories: list[Trajectory], samples: list[Sample]) -> None:
    """Send the requests of these episodes again, each context after the ids that are sampled now."""
    counts = [0] * len(trajectories)

    async def play(index: int, session: aiohttp.ClientSession) -> None:
        ids: list[int] = []
        for number, (segment, sampled) in enumerate(parts(trajectories[index])):
            if not sampled:
                ids += segment
                continue
            params = {
                "max_tokens": len(segment), "temperature": 1.0, "seed": 1000 * index + number, "ignore_eos": True,
                "logprobs": 0, "detokenize": False,
            }  # fmt: skip
            body = orjson.dumps({"token_ids": ids, "sampling_params": params})
            async with session.post(url + GENERATE, data=body, headers={"Content-Type": "application/json"}) as answer:
                if answer.status != 200:
                    raise SystemExit(f"status {answer.status}: {(await answer.text())[:300]}")
                sampled_now = orjson.loads(await answer.read())["choices"][0]["token_ids"]
            ids = ids + sampled_now
            counts[index] += len(sampled_now)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun, spent = time.perf_counter(), cpu_seconds()
        await asyncio.gather(*(play(index, session) for index in range(len(trajectories))))
        wall, cpu = time.perf_counter() - begun, cpu_seconds() - spent
    tokens = sum(counts)
    expected = sum(len(ids) for each in trajectories for ids, sampled in parts(each) if sampled)
    if tokens != expected:
        raise SystemExit(f"raw requests sampled {tokens} tokens and the episodes {expected}: no equal work")
    samples.append(Sample(cpu, wall, {"tokens": tokens, "tokens_per_s": tokens / wall}))
    print(f"raw: {tokens} tokens, {wall:.2f} s, {cpu:.2f} CPU-s", file=sys.stderr, flush=True)


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and of all that run below it: the server's."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def show(samples: dict[str, list[Sample]], rates: dict[str, float]) -> None:
    """Print a table for people."""
    table = Table("side", "tokens/s", "wall s", "CPU-s", "tokens", title="vllm_overhead")
    for side, taken in samples.items():
        figures = [rates[side], median(taken, "wall_s"), median(taken), median(taken, "tokens")]
        table.add_row(side, *(f"{each:.1f}" for each in figures))
    Console(file=sys.stderr).print(table)


if __name__ == "__main__":
    main()
