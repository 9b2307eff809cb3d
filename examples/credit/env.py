"""A mailroom: letters come one after the other, and each belongs into the tray of its sender's trade.

Which trade has which tray is nowhere written: a policy finds out by filing. A letter that was filed right is off the
pile; one that was not goes back under it and costs a turn. Every other letter is a circular: it may go anywhere, and
sometimes there is a tip for it, which is luck. So an outcome is the sum of many turns, of which few decide anything,
and most of what outcomes differ by has no reason.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

from turnwise.envs import Env, StepResult
from turnwise.tasks import Task
from turnwise.types import text_of

TRAYS = ("red", "blue", "green", "white")
TRADES = {"baker": "green", "miller": "red", "tailor": "white", "smith": "blue", "cooper": "red", "dyer": "green"}
CIRCULAR = "circular"
LETTERS = 8
SPARE = 6


class Mailroom(Env):
    """Rewards a letter that is filed right with its share of the letters, and a circular with a tip or none.

    Both are noted on the turn that did it, as ``filed`` and ``tip``. What is to be learned is ``filed``, at most 1.
    """

    default_tasks = f"{__file__}:tasks"

    def __init__(self, tip: float = 0.5) -> None:
        self.tip = tip

    def reset(self, task=None, *, seed=None):
        self.paid = self.tip if task is None else task.data.get("tip", self.tip)
        self.rng = random.Random(seed)
        pile = self.rng.choices(list(TRADES), k=LETTERS) + [CIRCULAR] * LETTERS
        self.rng.shuffle(pile)
        self.pile = deque(pile)
        self.left = 2 * LETTERS + SPARE
        return self.shown(), {"state": self.pile[0]}

    def step(self, action):
        letter, tray = self.pile.popleft(), text_of(action).strip()
        rewards = {"filed": 0.0, "tip": 0.0}
        # Drawn in every turn: whoever files otherwise meets another luck.
        lucky = self.rng.random() < 0.5
        if letter == CIRCULAR:
            rewards["tip"] = self.paid * lucky
        elif tray == TRADES[letter]:
            rewards["filed"] = 1.0 / LETTERS
        else:
            self.pile.append(letter)
        self.left -= 1
        info = {"rewards": rewards}
        if not self.pile or not self.left:
            return StepResult("", sum(rewards.values()), not self.pile, bool(self.pile), info)
        return StepResult(self.shown(), sum(rewards.values()), False, False, info | {"state": self.pile[0]})

    def shown(self) -> str:
        """What is said of the letter on top."""
        return f"From the {self.pile[0]}."


def tasks(n: int = 200, *, name: str = "mail", tip: float = 0.5) -> Iterator[Task]:
    """Yield ``n`` piles, whose letters are drawn when an episode resets; without tips the reward is what was filed."""
    for index in range(n):
        yield Task(f"{name}-{index}", "File the letters.", {"tip": tip})
