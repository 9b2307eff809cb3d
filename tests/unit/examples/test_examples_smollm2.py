"""The example on SmolLM2: its tasks, its demonstrations, and a job that begins with a pretrained model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from turnwise.config import load_config
from turnwise.errors import TaskError
from turnwise.ext.environments.arithmetic import evaluate
from turnwise.ext.environments.calculator import CalculatorEnv, Problem
from turnwise.tasks import Task
from turnwise.tasks.mix import load_mix
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.config.train import TrainConfig

EXAMPLES = Path(__file__).parents[3] / "examples"
HERE = EXAMPLES / "smollm2"


@contextlib.contextmanager
def found() -> Iterator[None]:
    """Let the modules of the example be imported."""
    folders = [str(HERE), str(EXAMPLES / "small_model")]
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(folder)


@pytest.fixture(scope="module")
def chains() -> Iterator[ModuleType]:
    with found():
        import chains

        yield chains


def written(problem: Problem) -> str:
    """The chain as it is said, without brackets."""
    return " ".join([str(problem.start), *(f"{sign} {number}" for sign, number in problem.steps)])


def problem(task: Task) -> Problem:
    return Problem.from_data(task.data, task.id)


@pytest.mark.parametrize("operations", [2, 3, 4])
def test_a_chain_that_reads_from_left_to_right_needs_no_brackets(chains: ModuleType, operations: int) -> None:
    for task in chains.tasks(100, operations=operations):
        chain = problem(task)
        assert len(chain.steps) == operations
        assert evaluate(written(chain)) == chain.answer
    for task in chains.tasks(100, operations=operations, kind="brackets"):
        chain = problem(task)
        signs = "".join(sign for sign, _ in chain.steps)
        assert "*" in signs.lstrip("*")


def test_no_held_out_chain_is_trained_on_or_shown(chains: ModuleType) -> None:
    train, test, brackets = (
        {task.prompt for task in tasks}
        for tasks in (
            chains.tasks(400, split="train"),
            chains.tasks(200, split="test"),
            chains.tasks(200, split="train", kind="brackets"),
        )
    )
    assert (len(train), len(test), len(brackets)) == (400, 200, 200)
    assert not train & test
    assert not brackets & (train | test)


def test_demonstrations_are_right_and_have_a_single_operation(chains: ModuleType) -> None:
    rows = asyncio.run(chains.demonstrations(20, 0))
    assert rows == asyncio.run(chains.demonstrations(20, 0)) != asyncio.run(chains.demonstrations(20, 1))
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant"]
        (call,) = row["messages"][1]["tool_calls"]
        assert str(evaluate(json.loads(call["function"]["arguments"])["expression"])) == row["messages"][-1]["content"]


def test_every_other_demonstration_of_two_operations_has_brackets(chains: ModuleType) -> None:
    rows = asyncio.run(chains.bracketed_demonstrations(21, 0))
    assert len(rows) == 21
    for number, row in enumerate(rows):
        (call,) = row["messages"][1]["tool_calls"]
        expression = json.loads(call["function"]["arguments"])["expression"]
        shape = r"\d+ [+*-] \d+ [+*-] \d+" if number % 2 else r"\(\d+ [+-] \d+\) \* \d+"
        assert re.fullmatch(shape, expression)
        assert str(evaluate(expression)) == row["messages"][-1]["content"]


def test_an_unknown_kind_of_chain_is_named(chains: ModuleType) -> None:
    with pytest.raises(TaskError, match="kind is 'long': it must be one of plain, brackets, both"):
        list(chains.tasks(1, kind="long"))


async def test_call_with_the_whole_chain_earns_1_and_a_shorter_call_earns_0(chains: ModuleType) -> None:
    (task,) = chains.tasks(1)
    chain = problem(task)
    assert chain.results[-1] != chain.results[0]
    for expression, reward in ((written(chain), 1.0), (f"{chain.start} {' '.join(map(str, chain.steps[0]))}", 0.0)):
        env = CalculatorEnv()
        env.reset(task)
        assert env.score({"role": "assistant", "content": str(evaluate(expression))}) == reward


@pytest.mark.parametrize(
    ("trains", "warms"), [("train", "sft"), ("brackets", "brackets-sft"), ("lookup", "lookup-sft")]
)
def test_its_configurations_load_and_name_tasks_that_are_there(trains: str, warms: str, tmp_path: Path) -> None:
    config = load_config(TrainConfig, HERE / f"{trains}.yaml", [f"policies.main.model.path={tmp_path}"])
    assert config.tasks is not None
    assert config.eval is not None
    trained, held_out = (load_mix(source).tasks for source in (config.tasks, config.eval.tasks))
    assert len(trained) >= 400
    assert len(held_out) >= 32
    assert not {task.id for task in trained} & {task.id for task in held_out}
    sft = load_config(SFTConfig, HERE / f"{warms}.yaml", [f"model.path={tmp_path}", "data=rows.jsonl"])
    # A model's own template shows no tools; training takes the one that the warm start saved with the model.
    assert sft.renderer.chat_template == "hermes-short"
    assert config.renderer.chat_template is None
