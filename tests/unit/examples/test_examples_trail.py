"""The trail: one sign after the other, each only when the one before was read, and tasks that are longer or shorter."""

from __future__ import annotations

import pytest
import trail_env

from turnwise.envs import make, reset_env, step_env
from turnwise.errors import EnvError, TaskError
from turnwise.tasks import Task, load_tasks
from turnwise.types import ToolCall


def read(sign):
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", "read_sign", {"place": sign})]}


async def begun(seed=0, **config):
    env = make("trail", **config)
    messages, _ = await reset_env(env, None, seed=seed)
    return env, messages


async def test_signs_lead_to_the_end_of_the_trail():
    env, [question] = await begun(steps=5, words=7)
    signs = env.trail.places
    assert question["content"] == f"A trail begins at {signs[0]}. Where does it end?"
    for number, sign in enumerate(signs):
        [answer] = (await step_env(env, read(sign))).observation
        end = f"Go on to {signs[number + 1]}." if number < 4 else f"The trail ends at {env.trail.end}."
        assert answer["content"].endswith(end)
        assert len(answer["content"].split(",")[0].split()) == 7
    result = await step_env(env, {"role": "assistant", "content": f" {env.trail.end}\n"})
    assert (result.terminated, result.reward) == (True, 1.0)


async def test_sign_ahead_of_the_trail_is_refused_and_earlier_signs_are_read_again():
    env, _ = await begun()
    first, second, third, *_ = env.trail.places
    [answer] = (await step_env(env, read(third))).observation
    assert "has not led" in answer["content"]
    [one] = (await step_env(env, read(first))).observation
    [two] = (await step_env(env, read(second))).observation
    [repeated] = (await step_env(env, read(first))).observation
    assert repeated["content"] == one["content"] != two["content"]
    assert env.reached == 2


async def test_a_lucky_guess_is_worth_nothing():
    env, _ = await begun()
    result = await step_env(env, {"role": "assistant", "content": env.trail.end})
    assert (result.terminated, result.reward) == (True, 0.0)


async def test_a_long_trail_comes_by_a_place_again_and_goes_on():
    env, _ = await begun(steps=60, words=0)
    assert len(set(env.trail.places)) < 60
    for number, sign in enumerate(env.trail.places):
        [answer] = (await step_env(env, read(sign))).observation
        assert answer["content"] == env.signs[number]
    assert env.reached == 60


def test_the_seed_and_the_content_decide():
    train = {trail_env.trail(seed) for seed in range(200)}
    test = {trail_env.trail(seed, split="test") for seed in range(200)}
    assert trail_env.trail(3) == trail_env.trail(3)
    assert not train & test
    assert not any(trail_env.stable_hash(*task_trail.places, task_trail.end) % 4 for task_trail in test)
    assert all(trail_env.stable_hash(*task_trail.places, task_trail.end) % 4 for task_trail in train)


async def test_tasks_say_how_long_their_trails_are():
    tasks = load_tasks("trail_env:tasks?n=60&steps=6&least=2&words=3&split=test")
    assert {task.data["steps"] for task in tasks} == {2, 3, 4, 5, 6}
    assert len({task.id for task in tasks}) == 60
    env = make("trail")
    await reset_env(env, tasks[0], seed=1)
    assert len(env.signs) == tasks[0].data["steps"]
    assert len(env.signs[0].split(",")[0].split()) == 3


@pytest.mark.parametrize(
    ("config", "words"), [({"steps": 0}, ["steps is 0", "at least 1"]), ({"words": -1}, ["words is -1", "at least 0"])]
)
async def test_option_out_of_range_is_an_error(config, words):
    with pytest.raises(EnvError) as caught:
        trail_env.TrailEnv(**config)
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(TaskError):
        list(trail_env.tasks(3, **config))
    with pytest.raises(TaskError):
        await reset_env(make("trail"), Task("a", "", config), seed=1)


def test_impossible_tasks_raise_task_error():
    with pytest.raises(TaskError, match="least is 9"):
        list(trail_env.tasks(3, least=9))
    with pytest.raises(TaskError, match="no split 'dev'"):
        list(trail_env.tasks(3, split="dev"))
