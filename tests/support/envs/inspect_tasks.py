"""Two small tasks of Inspect, an exact answer and a sum by a tool; as a program it plays them with a mock model.

``inspect_tasks.py PLAYS``, run by an interpreter that has Inspect: PLAYS is JSON, ``[[task, sample, actions], ...]``.
Prints the scores of each play, by the names of the scorers.
"""

from __future__ import annotations

import json
import sys
import tempfile

from inspect_ai import Task, task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    PARTIAL,
    Score,
    Target,
    accuracy,
    includes,
    match,
    scorer,
    value_to_float,
)
from inspect_ai.solver import Generate, TaskState, generate, solver, system_message, use_tools
from inspect_ai.tool import ToolCall, tool


@task
def capitals() -> Task:
    rows = [("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo")]
    samples = [Sample(input=f"The capital of {land}?", target=city) for land, city in rows]
    return Task(dataset=samples, solver=[system_message("Answer."), generate()], scorer=match())


@tool
def add():
    async def execute(x: int, y: int) -> str:
        """Add two numbers.

        Args:
            x: The first.
            y: The second.
        """
        return str(x + y)

    return execute


@scorer(metrics=[accuracy()])
def tooled():
    async def score(state: TaskState, target: Target) -> Score:
        right = target.text in state.output.completion
        called = any(message.role == "tool" for message in state.messages)
        return Score(value=INCORRECT if not right else CORRECT if called else PARTIAL)

    return score


@task
def sums() -> Task:
    samples = [Sample(input=f"Add {x} and {y}.", target=str(x + y)) for x, y in ((2, 40), (13, 8))]
    return Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=[tooled(), includes()])


@scorer(metrics=[accuracy()])
def constant(value):
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=value)

    return score


@task
def judged(value="N") -> Task:
    return Task(dataset=[Sample(input="Begin.", target="x")], solver=generate(), scorer=constant(value))


@solver
def restart():
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.messages = state.messages[:1]
        state.messages[0].content = "Once more."
        return await generate(state)

    return solve


@task
def rewritten() -> Task:
    return Task(dataset=[Sample(input="Begin.", target="x")], solver=restart(), scorer=match())


def output(action: dict) -> ModelOutput:
    calls = [ToolCall(id=call["id"], function=call["name"], arguments=call["arguments"]) for call in action["calls"]]
    model_output = ModelOutput.from_message(ChatMessageAssistant(content=action["text"], tool_calls=calls or None))
    # Inspect counts tokens that are not told, with a vocabulary that it downloads.
    model_output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return model_output


def played(name: str, sample: int, actions: list[dict]) -> dict[str, float]:
    inspect_task = {"capitals": capitals, "sums": sums}[name]()
    model = get_model("mockllm/model", custom_outputs=[output(action) for action in actions], memoize=False)
    number = value_to_float()
    with tempfile.TemporaryDirectory() as logs:
        [log] = evaluate(inspect_task, model=model, sample_id=sample + 1, display="none", log_dir=logs)
        assert log.status == "success", log.error
        return {name: number(score.value) for name, score in log.samples[0].scores.items()}


if __name__ == "__main__":
    print(json.dumps([played(*play) for play in json.loads(sys.argv[1])]))
