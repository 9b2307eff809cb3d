"""Our side of ``eval_throughput``: ``guess_number`` with a scripted model, with everything ``turnwise eval`` writes."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from guesses import AT_ONCE, GUESSES, HIGH, LOW, halved, numbers

from harness.chat import chat_dir
from turnwise.chat.renderer import load_renderer
from turnwise.evaluation import EvalConfig, EvalResult, evaluate
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.recorder.ledger import LedgerClient, LedgerWriter
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts
from turnwise.rollout.journal.finished import FinishedMembers
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task

TAIL = 24


class Guesser:
    """The scripted model: it reads the last answer of its session, and halves what is left."""

    def __init__(self) -> None:
        self._bounds: dict[str, tuple[int, int]] = {}

    def __call__(self, request: ScriptedRequest) -> str:
        """Return the next guess."""
        low, high = self._bounds.get(request.session_id, (LOW, HIGH))
        if request.number:
            said = request.renderer.decode(request.prompt[-TAIL:])
            low, high = halved(low, high, "higher" if "higher" in said else "lower")
        self._bounds[request.session_id] = low, high
        return str((low + high) // 2)


async def play(count: int, folder: Path) -> EvalResult:
    """Evaluate as ``turnwise eval`` does, with trajectories, ledger, finished members and summary."""
    renderer = load_renderer(chat_dir())
    rollout = RolloutConfig(
        env=SpecConfig(name="guess_number", config={"low": LOW, "high": HIGH, "guesses": GUESSES}),
        concurrency=AT_ONCE, max_turns=GUESSES, max_tokens_per_turn=16,
    )  # fmt: skip
    plan = EvalConfig(model=chat_dir(), rollout=rollout, samples=1, greedy=False)
    finished, book = FinishedMembers(folder), LedgerWriter(folder / "ledger.jsonl")
    client = LedgerClient(ScriptedClient(renderer, Guesser()), book)
    parts = RolloutParts(renderer, write=finished.write, finished=finished)
    producer = await RolloutProducer.create(rollout, client, None, parts)
    tasks = [Task(f"t{at}", "", {"number": number}) for at, number in enumerate(numbers(count))]
    result = await evaluate(producer, plan, tasks=tasks)
    result.write(folder)
    await producer.close()
    await client.close()
    finished.close()
    return result


def main(count: int) -> None:
    """Evaluate, and print one JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        begun, cpu = time.perf_counter(), time.process_time()
        result = asyncio.run(play(count, Path(folder)))
        wall, spent = time.perf_counter() - begun, time.process_time() - cpu
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    assert result.sampled is not None
    assert not result.sampled.failed
    value = result.sampled.success.mean
    print(json.dumps({"seconds": wall, "cpu": spent, "episodes": count, "success": value, "bytes": size}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
