"""A hosted judge against raw requests: judgements by a frozen policy, over the same requests to the same server.

256 of them (``--quick``: 64). The server is the built-in one, on one thread, with a Qwen3 model of random weights (4
layers, width 128). Either side
has 64 requests in flight. ``judge`` is ``function: judge, arguments: {policy: grader}`` as a run calls it: question
from the template, session, rendering, request, recorded turn, reading of the verdict. ``raw`` sends the prompts and
sampling parameters that the first turn of ``judge`` sent, as ids, with the same client and nothing else. A judgement is
one request of 16 new tokens (``attempts: 1``): what random weights write is no verdict, and that is the result.
``ratio`` (bar .9): judgements a second over raw requests a second, by medians. The first turn of either side is not
counted.
Checked, and an error otherwise: both sides generate the same ids.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.measure import machine, parse, parser
from harness.measure import report as write_report
from turnwise.config import load_config
from turnwise.envs.core import Env
from turnwise.envs.rewards import Judge
from turnwise.errors import EnvError
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.inference.replica_set import ReplicaSet
from turnwise.model.core import LLMClient, ModelInfo, ServedPolicy
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.sessions import EpisodeSessions, Sampler
from turnwise.tasks.core import Task
from turnwise.trainer.offline.small_model import make_model
from turnwise.types import Completion, Message, SamplingParams, TokenPrompt

JUDGEMENTS, QUICK_JUDGEMENTS, IN_FLIGHT, TOKENS = 256, 64, 64, 16
BAR = 0.9
Request = tuple[TokenPrompt, SamplingParams]


class RecordingClient(LLMClient):
    """Passes requests on, and records them with their completions."""

    def __init__(self, inner: LLMClient) -> None:
        self.inner = inner
        self.requests: dict[str, Request] = {}
        self.completions: dict[str, bytes] = {}

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        completion = await self.inner.generate(prompt, params, session_id=session_id)
        self.requests[session_id] = prompt, params
        self.completions[session_id] = completion.token_ids.tobytes()
        return completion

    async def model_info(self) -> ModelInfo:
        return await self.inner.model_info()

    async def close(self) -> None:
        await self.inner.close()


def small_model(directory: Path) -> Path:
    words = [f"{number} and {number + 1} make {2 * number + 1}" for number in range(200)]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}], "tools": []}
        for text in words
    ]
    make_model(directory, rows, seed=0, context=2048)
    return directory


async def timed(work: list[Any]) -> float:
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(job: Any) -> None:
        async with slots:
            await job()

    begun = time.perf_counter()
    await asyncio.gather(*map(one, work))
    return time.perf_counter() - begun


def judgements(served: ServedPolicy, config: RolloutConfig, turn: int, count: int) -> list[Any]:
    """Return judgements, each of an episode of its own."""
    judge = Judge(policy="grader", attempts=1, max_tokens=TOKENS, structured="never")
    sampler = Sampler.of(served, config)

    async def one(number: int) -> None:
        sessions = EpisodeSessions(
            {"main": sampler, "grader": sampler}, config, episode_id=f"e{number}-{turn}", seed=number, temperature=1.0,
            trained=True,
        )  # fmt: skip
        env = Env()
        env.open_judge = sessions.open_judge
        task = Task(f"t{number}", f"What do {number} and {number + 1} make?")
        final: Message = {"role": "assistant", "content": f"{number} and {number + 1} make {2 * number + 1}"}
        try:
            await judge(task, final, str(final["content"]), [*task.messages(), final], {}, env)
        except EnvError as error:
            if "no verdict" not in str(error):
                raise

    return [lambda number=number: one(number) for number in range(count)]


async def measure(turns: int, folder: Path, count: int) -> dict[str, list[float]]:
    model = small_model(folder / "model")
    inference = load_config(InferenceConfig, defaults={"threads": 1, "prefix_cache": False})
    config = load_config(
        RolloutConfig, defaults={"env": {"name": "single_turn"}, "frozen": {"grader": {"model": str(model)}}}
    )
    fleet = ReplicaSet(inference, model, logs=folder / "logs")
    seconds: dict[str, list[float]] = {"judge": [], "raw": []}
    try:
        await fleet.launch()
        client = fleet.client
        recording = RecordingClient(client)
        info = await client.model_info()
        renderer = RendererConfig().load(model)
        await timed(judgements(ServedPolicy(recording, renderer, info), config, 0, count))
        requests = list(recording.requests.values())
        answers: dict[int, bytes] = {}

        async def raw(number: int, turn: int) -> None:
            prompt, params = requests[number]
            completion = await client.generate(prompt, params, session_id=f"raw{number}-{turn}")
            answers[number] = completion.token_ids.tobytes()

        for turn in range(1, 2 + turns):
            seconds["judge"].append(await timed(judgements(ServedPolicy(client, renderer, info), config, turn, count)))
            jobs = [lambda number=number, turn=turn: raw(number, turn) for number in range(len(requests))]
            seconds["raw"].append(await timed(jobs))
        judged = list(recording.completions.values())
        if len(judged) != count or [answers[number] for number in range(count)] != judged:
            raise SystemExit("the sides did not generate the same ids")
    finally:
        await fleet.close()
    return {side: values[1:] for side, values in seconds.items()}


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=7, quick_repeats=2))
    count = QUICK_JUDGEMENTS if arguments.quick else JUDGEMENTS
    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(measure(arguments.repeats, Path(folder), count))
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    ratio = medians["raw"] / medians["judge"]
    write_report(
        {
            "ratio": round(ratio, 3),
            "bar": BAR,
            "judgements_per_second": round(count / medians["judge"], 1),
            "settings": {"judgements": count, "in_flight": IN_FLIGHT, "tokens": TOKENS},
            "seconds": seconds,
            "machine": machine(),
        }
    )


if __name__ == "__main__":
    main()
