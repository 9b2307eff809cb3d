"""Guessing a number: what counts as a guess, how an episode ends, and what it costs."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.envs import make, play_solution, reset_env
from turnwise.envs.basic import guess_number
from turnwise.envs.basic.guess_number import GuessNumberEnv
from turnwise.errors import EnvError, TaskError
from turnwise.tasks import Task
from turnwise.types import ToolCall


def begun(number=40, **settings):
    env = GuessNumberEnv(**{"low": 1, "high": 100, "guesses": 4, **settings})
    env.reset(Task("t", "", {"number": number}))
    return env


def said(env, text):
    result = env.step({"role": "assistant", "content": text})
    return result.observation[0]["content"], result


def test_higher_lower_correct():
    env = begun()
    assert said(env, "50")[0] == "lower; 3 left"
    assert said(env, "I try 10.")[0] == "higher; 2 left"
    text, result = said(env, "40")
    assert text == "correct"
    assert result[1:4] == (1.0, True, False)
    assert env.score(None) == 1.0
    with pytest.raises(EnvError, match=r"call reset\(\) first"):
        env.step({"role": "assistant", "content": "40"})


def test_when_no_guess_is_left_the_episode_ends_without_a_reward():
    env = begun(guesses=2)
    assert said(env, "1")[0] == "higher; 1 left"
    text, result = said(env, "2")
    assert text == "no guess is left; it was 40"
    assert result[1:4] == (0.0, True, False)
    assert env.score({"role": "assistant", "content": "40"}) == 0.0


@pytest.mark.parametrize("text", ["", "forty", "between 39 and 41", "4.5", "40,5", "1" * 400, "\\boxed{}", "40 40"])
def test_invalid_guesses_count_as_guesses(text):
    env = begun()
    answer, result = said(env, text)
    assert answer == "Answer with one whole number from 1 to 100; 3 left"
    assert result[1:4] == (0.0, False, False)


@pytest.mark.parametrize(
    "text",
    ["40", " 40.\n", "My guess: 40!", "+40", "between 39 and 41, so \\boxed{40}", "\\boxed{1} no, \\boxed{ 40 }"],
)
def test_forms_of_a_guess(text):
    assert said(begun(), text)[0] == "correct"


def test_negative_numbers():
    assert said(begun(-7, low=-10, high=10), "I say -7.")[0] == "correct"
    assert said(begun(-7, low=-10, high=10), "7")[0] == "lower; 3 left"


def test_calls_are_answered_although_there_are_no_tools():
    env = begun()
    calls = [ToolCall("a", "guess", {"n": 40}), ToolCall("b", "guess", {})]
    result = env.step({"role": "assistant", "content": "40", "tool_calls": calls})
    assert [message.get("tool_call_id") for message in result.observation] == ["a", "b", None]
    assert "there is no tool 'guess'" in result.observation[0]["content"]
    assert result.reward == 1.0


def test_settings_and_tasks_out_of_range_are_named():
    with pytest.raises(EnvError, match="low is 5 and high is 5"):
        make("guess_number", low=5, high=5)
    with pytest.raises(EnvError, match="guesses is 0"):
        make("guess_number", guesses=0)
    with pytest.raises(EnvError, match="high is '9'"):
        make("guess_number", high="9")
    with pytest.raises(TaskError, match=r"task 't': data\['number'\] is 0: .* from 1 to 100"):
        begun(0)


def test_the_seed_decides_the_number_and_all_numbers_come_up():
    env = GuessNumberEnv(low=1, high=8)
    numbers = []
    for seed in range(200):
        env.reset(seed=seed)
        numbers.append(env.number)
    assert set(numbers) == set(range(1, 9))
    env.reset(seed=11)
    assert env.number == numbers[11]


async def test_the_reference_halves_and_always_ends_in_time():
    for guesses in (1, 3, 10):
        env = make("guess_number", low=1, high=1000, guesses=guesses)
        for seed in range(20):
            await reset_env(env, seed=seed)
            played = await play_solution(env)
            assert played[-1][1].reward == 1.0
            assert len(played) <= guesses
    # With enough guesses it needs no knowledge: the first ones are the same for every number.
    assert played[0][0]["content"] == "500"


@given(st.integers(0, 30), st.lists(st.text(max_size=20), min_size=1, max_size=12))
def test_any_texts_end_in_time_or_in_a_guess(number, texts):
    env = GuessNumberEnv(low=0, high=30, guesses=12)
    env.reset(Task("t", "", {"number": number}))
    for count, text in enumerate(texts, 1):
        result = env.step({"role": "assistant", "content": text})
        assert result.terminated == (env.found or count == 12)
        assert result.reward == float(env.found)
        if result.terminated:
            break


def test_guess_number_stays_short_with_a_plain_step():
    assert len(inspect.getsource(guess_number).splitlines()) <= 130
    assert not inspect.iscoroutinefunction(GuessNumberEnv.step)
