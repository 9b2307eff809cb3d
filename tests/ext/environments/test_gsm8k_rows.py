"""The 1,319 test rows of GSM8K through ``math``: played by policies from a script, streamed, in bounded memory.

The rows are read from the directory in TURNWISE_GSM8K (``test.jsonl``); without it these tests are skipped.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest

from support.chat.toy_renderer import END, ToyRenderer
from turnwise.ext.environments.arithmetic import read_number
from turnwise.ext.environments.math import calculations
from turnwise.inference.scripted import Line, ScriptedClient, ScriptedRequest
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task, iter_tasks
from turnwise.trajectory import Trajectory
from turnwise.types import StopReason, ToolCall

FOLDER = os.environ.get("TURNWISE_GSM8K", "")
ROWS = 1319
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not FOLDER, reason="TURNWISE_GSM8K names no directory with GSM8K's test.jsonl"),
]

Script = Callable[[Task, ScriptedRequest], Line]


def rows() -> Iterator[Task]:
    assert (Path(FOLDER) / "test.jsonl").is_file(), f"TURNWISE_GSM8K is {FOLDER}: there is no test.jsonl in it"
    return iter_tasks(f"turnwise.ext.environments.math:tasks?path={FOLDER}&split=test")


def answers(request: ScriptedRequest) -> list[str]:
    """What the tool has answered so far, as the prompt shows it."""
    return [part.partition(f"<{END}>")[0] for part in request.text.split("=calculator:")[1:]]


class Replay:
    """Sends every gold annotation through the tool, and answers with what the tool said, not with what is written.

    The answer is the tool's result of the last calculation whose written result is the row's; the text of the row
    where no calculation is marked with it.
    """

    def __init__(self) -> None:
        self.calls = self.agreeing = self.from_tool = 0

    def __call__(self, task: Task, request: ScriptedRequest) -> Line:
        marked = calculations(task.data["solution"])
        if request.number < len(marked):
            expression = marked[request.number][0]
            call = ToolCall(f"call{request.number}", "calculator", {"expression": expression})
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        expected = read_number(task.data["answer"])
        answer_texts = answers(request)
        assert len(answer_texts) == len(marked)
        self.calls += len(marked)
        self.agreeing += sum(close(answer, result) for answer, (_, result) in zip(answer_texts, marked, strict=True))
        for answer, (_, result) in zip(reversed(answer_texts), reversed(marked), strict=True):
            if read_number(result) == expected:
                self.from_tool += 1
                return f"#### {answer}"
        return f"#### {task.data['answer']}"


def close(answer: str, written: str) -> bool:
    """Whether a result is the written one, which people rounded."""
    value, expected = read_number(answer), read_number(written)
    return value is not None and expected is not None and abs(value - expected) <= Fraction(1, 100) * abs(value)


async def play(tasks: Iterator[Task], script: Script) -> tuple[int, float]:
    """Play one episode of each task, one after the other; return how many there were and the sum of their rewards."""
    episodes, total = 0, 0.0
    config = RolloutConfig(env=SpecConfig(name="math"), max_turns=64)
    for task in tasks:
        renderer = ToyRenderer()
        client = ScriptedClient(renderer, lambda request, task=task: script(task, request))
        runner = EpisodeRunner(config, client, renderer, context_length=1_000_000)
        outcome = await runner.run(EpisodeSpec(task, group_id=task.id))
        await runner.close()
        assert outcome.error is None, f"{task.id}: {outcome.error}"
        (trajectory,) = outcome.trajectories
        assert trajectory.stop_reason is StopReason.COMPLETED
        episodes, total = episodes + 1, total + trajectory.reward
    return episodes, total


def alive(kind: type) -> int:
    return sum(type(instance) is kind for instance in gc.get_objects())


async def test_the_gold_calculations_solve_the_rows_through_the_tool_and_the_run_streams() -> None:
    """Neither rows nor what episodes left are held, however many there are."""
    counts_before = alive(Task), alive(Trajectory)
    largest = [0, 0]

    def watching(tasks: Iterator[Task]) -> Iterator[Task]:
        for number, task in enumerate(tasks):
            if number % 200 == 100:
                gc.collect()
                for index, kind in enumerate((Task, Trajectory)):
                    largest[index] = max(largest[index], alive(kind) - counts_before[index])
            yield task

    replay = Replay()
    episodes, total = await play(watching(rows()), replay)
    assert episodes == ROWS
    assert total / episodes >= 0.99
    # It is the tool that earns it: most answers are results of calls, and calls agree with what people wrote.
    assert replay.from_tool / episodes >= 0.9
    assert replay.calls > 4000
    assert replay.agreeing / replay.calls >= 0.999
    print(f"{total / episodes:.4f} of {episodes} rows; {replay.calls} calls, {replay.from_tool} answers from the tool")
    assert largest[0] <= 4
    assert largest[1] <= 4


async def test_an_empty_answer_is_worth_nothing_and_so_is_the_question() -> None:
    assert await play(rows(), lambda task, request: "") == (ROWS, 0.0)
    episodes, total = await play(rows(), lambda task, request: str(task.prompt))
    assert episodes == ROWS
    assert total / episodes <= 0.01


def test_reading_takes_less_memory_than_the_file() -> None:
    assert sum(1 for _ in islice(rows(), 20)) == 20
    gc.collect()
    tracemalloc.start()
    try:
        bytes_before = tracemalloc.get_traced_memory()[0]
        assert sum(1 for _ in rows()) == ROWS
        peak = tracemalloc.get_traced_memory()[1] - bytes_before
    finally:
        tracemalloc.stop()
    assert peak < (Path(FOLDER) / "test.jsonl").stat().st_size / 4
