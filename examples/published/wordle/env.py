"""Wordle by the rules of TextArena's ``Wordle-v0``, with a word list that a model of 0.14 M parameters can hold.

A word is a consonant, a vowel and a consonant, in capitals, and all 320 of them are words. One in eight is held out:
it is never the secret of a training episode.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import product
from typing import ClassVar

from turnwise.envs.core import Env, ResetResult, StepResult
from turnwise.errors import EnvError, TaskError
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tools.response import refuse_calls
from turnwise.types import Message, text_of

ALPHABETS = ("BDLMNPRT", "AEIOU", "BDLMNPRT")
"""Letters of each place."""
WORDS = ["".join(letters) for letters in product(*ALPHABETS)]
GUESSES = 6
SPLITS = ("train", "test")


class Wordle(Env):
    """Marks each letter of a guess: G in its place, Y elsewhere in the word, X not in it.

    A win pays 1. An episode without one pays what its last guess had, G whole and Y half, which is at most two thirds.
    A guess in another form, of no word or made before is asked for again; the second in a row ends the episode.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = f"{__file__}:tasks"

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Ask for the first guess."""
        self.task = next(tasks(1, seed=seed or 0)) if task is None else task
        self.secret: str = self.task.data["word"]
        self.guesses, self.errors, self.ended = list[str](), 0, False
        return [*self.task.messages()], {}

    def step(self, action: Message) -> StepResult:
        """Mark a guess."""
        if self.ended:
            raise EnvError("wordle: no episode runs: call reset() first")
        guess = read_guess(text_of(action))
        if guess is None or guess in self.guesses:
            self.errors += 1
            self.ended = self.errors > 1
            text = "no guess"
        else:
            self.errors = 0
            self.guesses.append(guess)
            self.ended = guess == self.secret or len(self.guesses) == GUESSES
            text = marks_text(guess, self.secret)
        answer: list[Message] = [] if self.ended else [{"role": "user", "content": text}]
        return StepResult(
            [*refuse_calls(action), *answer], self.score(action) if self.ended else 0.0, self.ended, False, {}
        )

    def score(self, final: Message | None) -> float:
        """The share of letters that the last guess had right: 1 is a win."""
        if not self.guesses:
            return 0.0
        marks = marks_of(self.guesses[-1], self.secret)
        return (marks.count("G") + marks.count("Y") / 2) / len(self.secret)


def read_guess(text: str) -> str | None:
    """Return the word between the first square brackets, or None where there is none."""
    match = re.search(r"\[(\w+)\]", text)
    word = match.group(1).upper() if match else ""
    return word if word in WORDS else None


def marks_of(guess: str, secret: str) -> str:
    """Return a mark for each letter; a letter counts as often as the secret has it, first where it is in its place."""
    marks = ["G" if letter == other else "X" for letter, other in zip(guess, secret, strict=True)]
    rest = [other for mark, other in zip(marks, secret, strict=True) if mark != "G"]
    for position, letter in enumerate(guess):
        if marks[position] != "G" and letter in rest:
            marks[position] = "Y"
            rest.remove(letter)
    return "".join(marks)


def marks_text(guess: str, secret: str) -> str:
    """Return the letters of a guess, each with its mark."""
    return " ".join(f"{letter}{mark}" for letter, mark in zip(guess, marks_of(guess, secret), strict=True))


def secrets(split: str) -> list[str]:
    """Return the words that are secrets of a split."""
    if split not in SPLITS:
        raise TaskError(f"wordle has no split {split!r}: {', '.join(SPLITS)}")
    words = random.Random(stable_hash("wordle")).sample(WORDS, len(WORDS))
    return words[::8] if split == "test" else [word for index, word in enumerate(words) if index % 8]


def tasks(n: int = 200, *, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Yield ``n`` tasks of a split, whose secrets take turns."""
    words = secrets(split)
    rng = random.Random(stable_hash("wordle tasks", split, seed))
    for index in range(n):
        if index % len(words) == 0:
            rng.shuffle(words)
        yield Task(f"wordle-{split}-{seed}-{index}", "guess", {"word": words[index % len(words)]})
