"""Wordle of examples/published: its marks, what is paid, and the words that are held out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.core import StepResult
from turnwise.plugins import load_file
from turnwise.tasks import Task

FILE = Path(__file__).parents[3] / "examples" / "published" / "wordle" / "env.py"


@pytest.fixture
def module(registries: None) -> Any:
    return load_file(FILE, "the environment")


def play(module: Any, secret: str, *guesses: str) -> list[StepResult]:
    env = module.Wordle()
    env.reset(Task("0", "guess", {"word": secret}))
    return [env.step({"role": "assistant", "content": guess}) for guess in guesses]


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [("BAT", "BAT", "GGG"), ("TAB", "BAT", "YGY"), ("BAB", "TUB", "XXG"), ("BAB", "BUT", "GXX"), ("BOB", "TAN", "XXX")],
)
def test_a_letter_is_marked_as_often_as_the_secret_has_it(module: Any, guess: str, secret: str, marks: str) -> None:
    assert module.marks_of(guess, secret) == marks


def test_only_a_win_pays_one(module: Any) -> None:
    losses = {
        play(module, secret, f"[{guess}]", "", "")[-1].reward
        for secret in module.WORDS[:40]
        for guess in module.WORDS
        if guess != secret
    }
    assert max(losses) == pytest.approx(2 / 3)
    assert play(module, "BAT", "[BIT]", "my guess is [bat]")[-1] == StepResult([], 1.0, True, False, {})


def test_six_guesses_or_two_errors_in_a_row_end_a_game(module: Any) -> None:
    words = [f"[{word}]" for word in module.WORDS[:6]]
    assert [result.terminated for result in play(module, "TUT", *words)] == [False] * 5 + [True]
    errors = play(module, "TUT", "BAD", "[BAD]", "[BAD]", "[QAT]")
    assert [result.observation for result in errors[:3]] == [
        [{"role": "user", "content": text}] for text in ("no guess", "BX AX DX", "no guess")
    ]
    assert [result.terminated for result in errors] == [False, False, False, True]


def test_held_out_words_are_no_secrets_of_training(module: Any) -> None:
    train, test = ({task.data["word"] for task in module.tasks(400, split=split)} for split in ("train", "test"))
    assert (len(train), len(test)) == (280, 40)
    assert train.isdisjoint(test)
