"""Word problems: rows from files and generated, the calculator, and which rule compares answers."""

from __future__ import annotations

import importlib.util
import json
from itertools import islice

import pytest

from turnwise.envs import close_env, make, play_solution, reset_env, score_env, step_env
from turnwise.errors import EnvError, MissingExtraError, TaskError
from turnwise.ext.environments import math
from turnwise.ext.environments.arithmetic import evaluate, write_number
from turnwise.ext.environments.math import calculations
from turnwise.ext.environments.math.generated import generated_rows
from turnwise.tasks import SourceConfig, Task, iter_tasks, load_tasks
from turnwise.types import ToolCall


def final(text):
    return {"role": "assistant", "content": text}


async def reward_of(task, text):
    env = make("math")
    await reset_env(env, task, seed=0)
    result = await step_env(env, final(text))
    await close_env(env)
    assert result.terminated
    return result.reward


def lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


GOOD = {"question": "How many?", "answer": "So <<1+1=2>>2.\n#### 2"}


# Rows.


def test_rows_become_tasks(tmp_path):
    file = lines(tmp_path / "test.jsonl", GOOD, "", {"question": "And?", "answer": "1,450"})
    first, second = load_tasks(f"turnwise.ext.environments.math:tasks?path={file}")
    assert (first.id, first.prompt) == ("test-0", "How many?")
    assert first.data == {"answer": "2", "solution": GOOD["answer"]}
    # The number of a line, so that ids do not move when an earlier line is left out.
    assert (second.id, second.data["answer"]) == ("test-2", "1,450")
    assert load_tasks(f"turnwise.ext.environments.math:tasks?path={tmp_path}&split=test&n=1") == [first]
    mapped = SourceConfig(source=str(file), map="turnwise.ext.environments.math:row")
    assert [task.data for task in load_tasks(mapped)] == [first.data, second.data]


@pytest.mark.parametrize(
    ("malformed", "words"),
    [
        ({"question": "What?"}, "column 'answer' is missing (here: 'question')"),
        ({"answer": "#### 2"}, "column 'question' is missing (here: 'answer')"),
        ({"question": "What?", "answer": 2}, "column 'answer' is 2: it must be a non-empty string"),
        ({"question": " ", "answer": "2"}, "column 'question' is ' '"),
        ({"question": "What?", "answer": "one line\nand no result"}, "has no result: end it with a line '#### 42'"),
        ({"question": "What?", "answer": "nothing behind it\n####"}, "has no result"),
        ('{"question": "Wha', "not JSON"),
        ("[1]", "column 'question' is missing (here: [1])"),
    ],
)
def test_a_bad_line_is_named_by_number_and_read_lazily(tmp_path, malformed, words):
    file = lines(tmp_path / "rows.jsonl", *[GOOD] * 16, malformed)
    source = math.tasks(path=file)
    assert len(list(islice(source, 16))) == 16
    with pytest.raises(TaskError) as failure:
        next(source)
    assert f"{file}:17: " in str(failure.value)
    assert words in str(failure.value)


def test_missing_files_and_splits_raise_task_error(tmp_path):
    with pytest.raises(TaskError, match=r"nowhere.jsonl: there is no such file"):
        next(math.tasks(path=tmp_path / "nowhere.jsonl"))
    with pytest.raises(TaskError, match=r"dev.jsonl: there is no such file"):
        next(math.tasks(path=tmp_path, split="dev"))
    file = lines(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(TaskError, match="split='test' is for directories"):
        next(math.tasks(path=file, split="test"))
    with pytest.raises(TaskError, match="has no split 'dev'"):
        next(math.tasks(split="dev"))


def test_files_of_any_length_are_streamed(tmp_path):
    file = lines(tmp_path / "rows.jsonl", *[GOOD] * 5000)
    assert sum(1 for _ in iter_tasks(f"turnwise.ext.environments.math:tasks?path={file}")) == 5000
    assert len(load_tasks(f"turnwise.ext.environments.math:tasks?path={file}&n=7")) == 7


def test_generated_problems_are_right_and_belong_to_one_split():
    texts = {}
    for split in ("train", "test"):
        rows = list(generated_rows(300, split=split, seed=0))
        texts[split] = {question for question, _ in rows}
        assert len(texts[split]) > 290
        for question, solution in rows:
            steps = calculations(solution)
            assert len(steps) >= 2
            assert all(write_number(evaluate(expression)) == result for expression, result in steps)
            assert solution.endswith(f"#### {steps[-1][1]}")
            assert "{" not in question
    assert not texts["train"] & texts["test"]
    # Every template comes up.
    assert {text for text in texts["train"] if "coast" in text}
    assert list(generated_rows(5, split="test", seed=0)) == list(generated_rows(9, split="test", seed=0))[:5]
    assert list(generated_rows(5, split="test", seed=1)) != list(generated_rows(5, split="test", seed=0))


def test_calculations_of_a_solution():
    assert calculations("a <<12*3=36>>36 b << .5*10 = 5 >>5 c <<x>> <<=3>>") == [("12*3", "36"), (".5*10", "5")]


# Episodes.


async def test_the_prompt_and_the_tool():
    env = make("math")
    (task,) = math.tasks(n=1)
    messages, _ = await reset_env(env, task, seed=0)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert "####" in messages[0]["content"]
    assert messages[1]["content"] == task.prompt
    call = ToolCall("c", "calculator", {"expression": "$1,200 * 15%"})
    result = await step_env(env, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert result.observation[0]["content"] == "180"
    call = ToolCall("d", "calculator", {"expression": "12 apples"})
    result = await step_env(env, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert "cannot be evaluated" in result.observation[0]["content"]
    plain = make("math", instructions=None)
    assert (await reset_env(plain, task, seed=0))[0] == messages[1:]
    custom = Task("t", [{"role": "system", "content": "mine"}, {"role": "user", "content": "?"}], {"answer": "1"})
    assert (await reset_env(env, custom, seed=0))[0] == custom.prompt


async def test_the_answer_is_boxed_or_hashed_or_the_only_number():
    task = Task("t", "?", {"answer": "1,450"})
    for text, value in {
        "#### 1450": 1, "It is 12.\n#### $1,450.00": 1, "#### 1450 dollars\n": 1, "\\boxed{1450}": 1,
        "so $\\boxed{\\$1{,}450}$": 1, "The answer is 1450.": 1, "1450": 1, "#### 12\nno\n#### 1450": 1,
        "#### 2900/2": 1, "\\boxed{\\frac{2900}{2}}": 1, "\\boxed{1} then \\boxed{1450}": 1,
        "#### 1449": 0, "#### 1450.001": 0, "": 0, "####": 0, "\\boxed{1449} #### 1450": 0,
        "between 1450 and 1451": 0, "12 * 3 is 36, so 1450": 0, "#### unknown": 0,
        "#### 1450%": 0, "#### 145000%": 0, "\\boxed{1450\\%}": 0, "#### 1 = 1450": 0,
    }.items():  # fmt: skip
        assert await reward_of(task, text) == value, text
    share = Task("s", "What percent is red?", {"answer": "50"})
    assert [await reward_of(share, f"#### {text}") for text in ("50", "50%", "0.5", "5000%")] == [1, 1, 0, 0]
    env = make("math")
    await reset_env(env, task, seed=0)
    assert await score_env(env, None) == {"score": 0.0}


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
async def test_an_answer_that_is_no_number_is_compared_symbolically():
    task = Task("t", "?", {"answer": "\\frac{\\sqrt{3}}{2}"})
    assert await reward_of(task, "\\boxed{\\frac{3}{2\\sqrt{3}}}") == 1.0
    assert await reward_of(task, "\\boxed{\\frac{\\sqrt{3}}{3}}") == 0.0
    assert await reward_of(task, "It follows.\n#### \\frac{3}{2\\sqrt{3}}") == 1.0
    assert await reward_of(task, "It follows.\n#### \\frac{3}{\\sqrt{3}}") == 0.0
    assert await reward_of(task, "") == 0.0


async def test_only_symbolic_rows_need_math_verify(monkeypatch):
    """Without math-verify a row that needs it does not begin; one that is a number neither needs nor asks for it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "math_verify" else find(name, *rest)
    )
    assert await reward_of(Task("t", "?", {"answer": "0.5"}), "\\boxed{\\frac{1}{2}}") == 1.0
    assert await reward_of(Task("t", "?", {"answer": "0.5"}), "\\boxed{\\sqrt{0.25}}") == 0.0
    with pytest.raises(MissingExtraError, match=r"turnwise-rl\[rewards\]"):
        await reward_of(Task("t", "?", {"answer": "\\sqrt{2}"}), "1")


async def test_reset_without_task_or_answer_raises():
    with pytest.raises(EnvError, match=r"turnwise\.ext\.environments\.math:tasks"):
        await reset_env(make("math"), seed=0)
    for data in ({}, {"answer": 3}, {"answer": " "}):
        with pytest.raises(TaskError, match=r"task 't': data\['answer'\]"):
            await reset_env(make("math"), Task("t", "?", data), seed=0)


async def test_the_reference_does_the_marked_calculations():
    env = make("math")
    for task in math.tasks(n=10, split="test"):
        await reset_env(env, task, seed=0)
        played = await play_solution(env)
        expressions = [call.arguments["expression"] for message, _ in played for call in message.get("tool_calls", ())]
        assert expressions == [expression for expression, _ in calculations(task.data["solution"])]
        assert played[-1][1].reward == 1.0
