"""The picture: a chart that no text tells, its two splits, and what counts as an answer."""

from __future__ import annotations

import io
from dataclasses import replace

import picture_env
import pytest
from picture_env import COLOURS, HIGHEST, chart, describe_bar, draw
from PIL import Image

from turnwise.envs import make, reset_env, step_env
from turnwise.errors import TaskError
from turnwise.tasks import Task, load_tasks
from turnwise.types import ToolCall

LOOK = {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", "look", {})]}


async def scored(answer: str, seed: int = 3) -> float:
    env = make("picture")
    await reset_env(env, Task("t", "", {"colour": "blue"}), seed=seed)
    result = await step_env(env, {"role": "assistant", "content": answer})
    assert result.terminated
    return result.reward


async def test_only_the_picture_tells_the_height():
    env = make("picture")
    [question], info = await reset_env(env, Task("t", "", {"colour": "red"}), seed=1)
    assert question["content"] == "How high is the red bar? Answer with its colour and height."
    assert info == {}
    [answer] = (await step_env(env, LOOK)).observation
    [part] = answer["content"]
    assert part["type"] == "image_url"


def test_drawn_bars_have_the_heights_of_the_chart():
    for seed in range(20):
        bars = chart(seed)
        assert sorted(bars.colours) == sorted(COLOURS)
        image = Image.open(io.BytesIO(draw(bars)))
        assert image.size == (64, 16)
        for number, (colour, height) in enumerate(zip(bars.colours, bars.heights, strict=True)):
            square = image.crop((16 * number, 0, 16 * number + 16, 16))
            pixels = {pixel: count for count, pixel in square.getcolors()}
            assert pixels.pop(COLOURS[colour]) == 12 * 2 * height
            assert len(pixels) == 1, "the ground"


def test_no_chart_of_the_evaluation_is_ever_trained_on():
    trained, held_out = ({chart(seed, split=split) for seed in range(3000)} for split in ("train", "test"))
    assert len(trained) > 2000
    assert len(held_out) > 2000
    assert not trained & held_out
    heights = [trained_chart.heights[0] for trained_chart in trained]
    assert all(heights.count(height) > 3000 / HIGHEST / 2 for height in range(1, HIGHEST + 1))


async def test_the_answer_is_colour_and_height_and_nothing_else():
    bars = chart(3)
    right = f"blue {bars.height('blue')}"
    assert describe_bar(bars, "blue") == right
    assert await scored(f" {right}\n") == 1.0
    other = replace(bars, heights=tuple(HIGHEST + 1 - height for height in bars.heights))
    for wrong in (
        f"I think it is {right}.",
        f"{right}, {right}",
        str(bars.height("blue")),
        describe_bar(other, "blue"),
        "",
    ):
        assert await scored(wrong) == 0.0, wrong


async def test_unknown_colour_or_split_is_a_task_error():
    with pytest.raises(TaskError, match="no split='dev': splits are train, test"):
        chart(0, split="dev")
    with pytest.raises(TaskError, match="no colour='pink': colours are red, green, blue, yellow"):
        await reset_env(make("picture"), Task("t", "", {"colour": "pink"}), seed=0)


def test_tasks_ask_for_every_bar_and_keep_their_ids():
    rows = load_tasks("picture_env:tasks?n=40&split=test")
    assert len({row.id for row in rows}) == 40
    assert {row.data["colour"] for row in rows} == set(COLOURS)
    assert rows[0].prompt == picture_env.question(rows[0].data["colour"])
