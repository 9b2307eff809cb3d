"""The calculator environment: its problems, its tool, its tasks, its teacher's manners."""

from __future__ import annotations

import pytest

from turnwise.envs import make, play_solution, reset_env, score_env, step_env
from turnwise.errors import EnvError, TaskError
from turnwise.ext.environments import calculator
from turnwise.ext.environments.calculator import Problem
from turnwise.tasks import Task, load_tasks
from turnwise.tasks.seeded import SPLITS
from turnwise.types import ToolCall


def call(expression):
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", "calculate", {"expression": expression})]}


def final(text):
    return {"role": "assistant", "content": text}


def test_operations_are_applied_in_order():
    problem = Problem(2, (("+", 3), ("*", 4), ("-", 5)))
    assert problem.question == "Take 2, plus 3, then times 4, then minus 5. What is the result?"
    # (2 + 3) * 4 - 5, and not 2 + 3 * 4 - 5.
    assert problem.results == [5, 20, 15]
    assert problem.answer == 15


def test_the_seed_decides_everything_and_numbers_stay_in_range():
    assert calculator.problem(5) == calculator.problem(5)
    problems = [calculator.problem(seed, operations=3, largest=30) for seed in range(300)]
    assert len(set(problems)) > 290
    for problem in problems:
        assert len(problem.steps) == 3
        assert all(2 <= number <= 30 for number in (problem.start, *(number for _, number in problem.steps)))
        assert all(0 <= result <= 50 * 30 for result in problem.results)
    assert {sign for problem in problems for sign, _ in problem.steps} == {"+", "-", "*"}


def test_no_problem_is_in_both_splits():
    train, test = ({calculator.problem(seed, split=split) for seed in range(400)} for split in SPLITS)
    assert not train & test
    with pytest.raises(TaskError, match="no split 'dev': train, test"):
        calculator.problem(0, split="dev")


def test_tasks_hold_their_problem():
    first = list(calculator.tasks(20, split="test"))
    assert first == load_tasks("turnwise.ext.environments.calculator:tasks?n=20&split=test")
    assert first[:5] == list(calculator.tasks(5, split="test"))
    assert first[3].id == "calculator-test-0-3"
    for task in first:
        problem = Problem.from_data(task.data, "here")
        assert task.prompt == problem.question
        assert "answer" not in task.data
    hard = load_tasks("turnwise.ext.environments.calculator:tasks?n=3&operations=5&largest=500")
    assert {len(task.data["steps"]) for task in hard} == {5}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "'start'"),
        ({"start": "3", "steps": [["+", 1]]}, "'start'"),
        ({"start": 3, "steps": []}, "'steps'"),
        ({"start": 3, "steps": [["plus", 1]]}, r'\["\*", 7\]'),
        ({"start": 3, "steps": [["+", 1.5]]}, "'steps'"),
        ({"start": 3, "steps": "+1"}, "'steps'"),
    ],
)
async def test_a_task_that_is_no_problem_is_named(data, words):
    with pytest.raises(TaskError, match=rf"task 'mine'.*{words}"):
        await reset_env(make("calculator"), Task("mine", "?", data), seed=0)


def test_settings_out_of_range_are_named():
    with pytest.raises(EnvError, match="operations is 0: it must be a whole number of at least 1"):
        make("calculator", operations=0)
    with pytest.raises(EnvError, match="largest is 1"):
        make("calculator", largest=1)
    with pytest.raises(TaskError, match="largest is 'big'"):
        load_tasks("turnwise.ext.environments.calculator:tasks?largest=big")


async def test_only_the_right_number_alone_is_worth_1():
    env = make("calculator")
    task = Task("t", "?", {"start": 1200, "steps": [["*", 2], ["-", 40]]})
    for answer, score in {
        "2360": 1.0, " 2,360. ": 1.0, "2360.0": 1.0,
        "2361": 0.0, "-2360": 0.0, "I think it is 2360.": 0.0, "2360 or 2361": 0.0, "1200*2-40": 0.0, "": 0.0,
    }.items():  # fmt: skip
        messages, _ = await reset_env(env, task, seed=0)
        assert messages == [{"role": "user", "content": "Take 1200, times 2, then minus 40. What is the result?"}]
        result = await step_env(env, final(answer))
        assert (result.reward, result.terminated) == (score, True), answer
    await reset_env(env, task, seed=0)
    assert await score_env(env, None) == {"score": 0.0}


async def test_calculate_tool_returns_values_and_names_errors():
    env = make("calculator")
    await reset_env(env, seed=0)
    result = await step_env(env, call("1200 * 2"))
    assert result.observation[0]["content"] == "2400"
    result = await step_env(env, call("9**9**9"))
    assert '"tool_error"' in result.observation[0]["content"]
    assert "too large" in result.observation[0]["content"]
    assert not result.truncated


async def test_without_a_task_the_seed_draws_the_problem():
    env = make("calculator", operations=4, largest=50)
    first, _ = await reset_env(env, seed=3)
    repeated, _ = await reset_env(env, seed=3)
    other, _ = await reset_env(env, seed=4)
    assert first == repeated != other
    assert first[0]["content"].count("then") == 3
    free = [(await reset_env(env))[0][0]["content"] for _ in range(5)]
    assert len(set(free)) > 1


async def test_the_reference_calls_once_per_operation_and_is_right():
    env = make("calculator", operations=3)
    for seed in range(5):
        await reset_env(env, seed=seed)
        played = await play_solution(env)
        assert len(played) == 4
        assert played[-1][1].reward == 1.0
