"""Demonstrations for the warm start: how a guess is written, and what marks are good for, now and then.

For each letter of a guess the teacher looks at the marks four times in ten: it then keeps a green letter, moves a
yellow one, and avoids what was marked X. Else it draws any letter. It wins two games in nine; always attentive it would
win 85 %.
"""

from __future__ import annotations

import random
from typing import Any

from env import ALPHABETS, Wordle, marks_of, tasks

from turnwise.envs.core import as_messages, close_env, reset_env, step_env
from turnwise.types import Message

ATTENTION = 0.4
"""Probability with which the teacher looks at the marks before it draws a letter."""


def draw_guess(env: Wordle, rng: random.Random) -> str:
    """Draw a word that was not guessed before."""
    while True:
        letters = [
            rng.choice(fitting_letters(env, position) if rng.random() < ATTENTION else ALPHABETS[position])
            for position in range(len(ALPHABETS))
        ]
        word = "".join(letters)
        if word not in env.guesses:
            return word


def fitting_letters(env: Wordle, position: int) -> str:
    """Return the letters that the marks allow at a position: the green one, else the yellow one of the other end."""
    letters = ALPHABETS[position]
    for guess in env.guesses:
        marks = marks_of(guess, env.secret)
        for index, (letter, mark) in enumerate(zip(guess, marks, strict=True)):
            if mark == "G" and index == position:
                return letter
            if mark == "Y" and index + position == 2:
                letters = letter
            elif mark == "X" or index == position:
                letters = letters.replace(letter, "") or letters
    return letters


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play the teacher on training words; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    rows = []
    for number, task in enumerate(tasks(count, seed=seed + 1)):
        env = Wordle()
        first_messages, _ = await reset_env(env, task, seed=number)
        messages: list[Message] = list(first_messages)
        while not env.ended:
            messages.append({"role": "assistant", "content": f"[{draw_guess(env, rng)}]"})
            result = await step_env(env, messages[-1])
            messages += as_messages(result.observation)
        await close_env(env)
        rows.append({"messages": messages, "tools": []})
    return rows
