"""Guess a hidden number from "higher" and "lower": an environment without tools."""

from __future__ import annotations

import random
import re
from typing import ClassVar, Final

from turnwise.envs.core import Env, ResetResult, Solution, StepResult
from turnwise.errors import EnvError, TaskError, shown
from turnwise.tasks import Task
from turnwise.tools.response import refuse_calls
from turnwise.types import Message, text_of

_BOXED: Final = re.compile(r"\\boxed\{\s*([-+]?[0-9]{1,18})\s*\}")
_NUMBER: Final = re.compile(r"(?<![0-9.])[-+]?[0-9]{1,18}(?!\.?[0-9])")


class GuessNumberEnv(Env):
    """Hides a number and answers guesses with "higher" or "lower". 1 for finding it in time, else 0.

    Attributes:
        low: Least hidden number.
        found: Whether it was guessed.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.tasks.seeded:tasks"

    def __init__(self, low: int = 1, high: int = 1000, guesses: int = 10) -> None:
        """Set the range of numbers and the guesses."""
        for name, value in (("low", low), ("high", high), ("guesses", guesses)):
            if type(value) is not int or abs(value) >= 10**18:
                raise EnvError(
                    f"guess_number: {name} is {shown(value)}: it must be a whole number of 18 digits at most"
                )
        if low >= high:
            raise EnvError(f"guess_number: low is {low} and high is {high}: high must be larger")
        if guesses < 1:
            raise EnvError(f"guess_number: guesses is {guesses}: there must be at least 1")
        self.low, self.high, self.guesses = low, high, guesses
        self._over = True

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Hide the task's ``data["number"]``, or one drawn from the seed."""
        number = None if task is None else task.data.get("number")
        if number is not None and (type(number) is not int or not self.low <= number <= self.high):
            name = None if task is None else task.id
            raise TaskError(
                f"task {name!r}: data['number'] is {shown(number)}: it must be a whole number from {self.low} to "
                f"{self.high}"
            )
        self.number = random.Random(seed).randint(self.low, self.high) if number is None else number
        self.left, self.found, self._over = self.guesses, False, False
        text = (
            f"I hide a whole number from {self.low} to {self.high}. You have {self.guesses} guesses; after each I say "
            "higher or lower. Answer with your guess alone."
        )
        return text, {}

    def step(self, action: Message) -> StepResult:
        """Answer a guess. An invalid one counts, too, so that episodes end."""
        if self._over:
            raise EnvError("guess_number: no episode runs: call reset() first")
        self.left -= 1
        content = action.get("content")
        guess = _guess(content if type(content) is str else text_of(action))
        self.found = guess == self.number
        self._over = self.found or self.left == 0
        if self.found:
            answer = "correct"
        elif self._over:
            answer = f"no guess is left; it was {self.number}"
        elif guess is None:
            answer = f"Answer with one whole number from {self.low} to {self.high}; {self.left} left"
        else:
            answer = f"{'higher' if guess < self.number else 'lower'}; {self.left} left"
        observation: list[Message] = [*refuse_calls(action), {"role": "user", "content": answer}]
        return StepResult(observation, float(self.found), self._over, False, {})

    def score(self, final: Message | None) -> float:  # noqa: ARG002 - what was guessed counts, not what was said last
        """1 if the number was found, else 0."""
        return float(self.found)

    def solve(self) -> Solution:
        """Halve what is left; the last guess is the number."""
        low, high = self.low, self.high
        while True:
            guess = (low + high) // 2 if self.left > 1 else self.number
            yield str(guess)
            low, high = (guess + 1, high) if guess < self.number else (low, guess - 1)


def _guess(text: str) -> int | None:
    boxed = _BOXED.findall(text) if "\\boxed" in text else None
    numbers = boxed or _NUMBER.findall(text)
    return int(numbers[-1]) if boxed or len(numbers) == 1 else None
