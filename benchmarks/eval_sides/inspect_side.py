"""inspect_ai's side of ``eval_throughput``: an equivalent task with its mock model, logged as its users log."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

from guesses import AT_ONCE, GUESSES, PROMPT, guess_after, numbers
from inspect_ai import Task
from inspect_ai import eval as run_eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, scorer, stderr
from inspect_ai.solver import Generate, TaskState, solver


@solver
def play() -> Any:
    """Ask for guesses until one is right or none is left."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for left in range(GUESSES - 1, -1, -1):
            state = await generate(state)
            guess, number = int(state.output.completion), state.metadata["number"]
            state.store.set("found", guess == number)
            if guess == number or left == 0:
                break
            said = f"{'higher' if guess < number else 'lower'}; {left} left"
            state.messages.append(ChatMessageUser(content=said))
        return state

    return solve


@scorer(metrics=[accuracy(), stderr()])
def found() -> Any:
    """1 where the number was found."""

    async def score(state: TaskState, target: Target) -> Score:  # noqa: ARG001
        return Score(value=1.0 if state.store.get("found") else 0.0)

    return score


def answer(messages: list[Any], *about: Any) -> ModelOutput:
    """Return the next guess; the usage is said, so that the mock counts no tokens."""
    del about
    answers = [message.text for message in messages if message.role == "user"][1:]
    output = ModelOutput.from_content("mockllm", guess_after(answers))
    output.usage = ModelUsage(input_tokens=100, output_tokens=3, total_tokens=103)
    return output


def main(count: int) -> None:
    """Evaluate, and print one JSON object."""
    samples = [Sample(PROMPT, metadata={"number": number}, id=f"t{at}") for at, number in enumerate(numbers(count))]
    with tempfile.TemporaryDirectory() as folder:
        task = Task(dataset=samples, solver=play(), scorer=found())
        begun, cpu = time.perf_counter(), time.process_time()
        [log] = run_eval(
            task, model=get_model("mockllm/model", custom_outputs=answer), log_dir=folder, display="none",
            max_samples=AT_ONCE, max_connections=AT_ONCE,
        )  # fmt: skip
        wall, spent = time.perf_counter() - begun, time.process_time() - cpu
        size = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
    assert log.status == "success", log.error
    value = log.results.scores[0].metrics["accuracy"].value
    print(json.dumps({"seconds": wall, "cpu": spent, "episodes": count, "success": value, "bytes": size}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
