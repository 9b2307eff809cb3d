"""The teachers of the small models: wrong in what they do, never in what they copy."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import picture_env
import pytest
from PIL import Image

from turnwise.envs.basic import lookup
from turnwise.ext.environments import calculator
from turnwise.ext.environments.arithmetic import evaluate, read_number

EXAMPLES = Path(__file__).parents[3] / "examples"
COUNT = 400


def rows(example):
    if str(EXAMPLES / "small_model") not in sys.path:
        sys.path.append(str(EXAMPLES / "small_model"))
    spec = importlib.util.spec_from_file_location(f"teacher_of_{example}", EXAMPLES / example / "teacher.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return asyncio.run(module.demonstrations(COUNT, 0))


@pytest.fixture(scope="module")
def conversations():
    return rows("calculator")


def calls(row):
    tool_calls = [call for message in row["messages"] for call in message.get("tool_calls", ())]
    return [json.loads(call["function"]["arguments"])["expression"] for call in tool_calls]


def test_calls_of_the_teacher_are_right_and_answers_are_shown_numbers(conversations):
    for row, task in zip(conversations, calculator.tasks(COUNT), strict=True):
        problem = calculator.Problem.from_data(task.data, "here")
        values = [problem.start, *problem.results]
        right = [f"{value} {sign} {number}" for value, (sign, number) in zip(values, problem.steps, strict=False)]
        expressions = calls(row)
        assert expressions == right[: len(expressions)]
        answered = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        assert answered == [str(evaluate(expression)) for expression in expressions]
        [number] = re.findall(r"\d+", row["messages"][-1]["content"])
        assert int(number) == (values[len(expressions)] if expressions else problem.start)


def test_about_a_fifth_of_the_answers_is_right(conversations):
    answers = [
        read_number(row["messages"][-1]["content"]) == calculator.Problem.from_data(task.data, "here").answer
        for row, task in zip(conversations, calculator.tasks(COUNT), strict=True)
    ]
    assert 0.12 < sum(answers) / COUNT < 0.25
    assert {len(calls(row)) for row in conversations} == {0, 1, 2}


def test_a_seed_is_the_same_demonstrations(conversations):
    assert rows("calculator") == conversations
    assert [tool["function"]["name"] for tool in conversations[0]["tools"]] == ["calculate"]


def test_the_teacher_of_lookup_copies_right_too():
    for row in rows("lookup"):
        *_, answer = row["messages"]
        arguments = [json.loads(c["function"]["arguments"]) for m in row["messages"] for c in m.get("tool_calls", ())]
        answers = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        [person] = [name for name in lookup.NAMES if f"manages {name}?" in row["messages"][0]["content"]]
        assert arguments == [{"person": person}, {"team": answers[0]} if answers else None][: len(arguments)]
        assert (answers[-1] if answers else person) in answer["content"]


def bars_of(row):
    """The heights of a conversation's bars, by colour, as its picture has them; nothing without a look."""
    parts = [part for message in row["messages"] if message["role"] == "tool" for part in message["content"]]
    if not parts:
        return {}
    [part] = parts
    image = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
    counts = {pixel: count for count, pixel in image.getcolors()}
    # A unit of height is twelve by two pixels.
    return {name: counts[pixel] / 24 for name, pixel in picture_env.COLOURS.items()}


def test_answers_of_the_picture_teacher_match_the_picture():
    right = 0
    for row, task in zip(rows("picture"), picture_env.tasks(COUNT), strict=True):
        bars, colour = bars_of(row), task.data["colour"]
        heights = {name: int(height) for name, height in map(str.split, row["messages"][-1]["content"].split(", "))}
        if bars:
            assert heights == {name: bars[name] for name in heights}
            assert len(heights) in (1, 4)
            right += list(heights) == [colour]
        else:
            assert list(heights) == [colour]
    assert 0.22 < right / COUNT < 0.38
