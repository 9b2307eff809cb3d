"""A mailroom: letters come one after the other, and each belongs into the tray of its sender's trade.

Which trade has which tray is nowhere written: a policy finds out by filing. A letter that was filed right is off the
pile; one that was not goes back under it and costs a turn, and there are more turns than letters, but not many more.
Circulars go into any tray: those turns teach nothing. So many turns make one outcome, and few of them say why.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

from turnwise.envs import Env, StepResult, refuse_calls
from turnwise.tasks import Task
from turnwise.types import text_of

TRAYS = ("red", "blue", "green", "white")
TRADES = {"baker": "green", "miller": "red", "tailor": "white", "smith": "blue", "cooper": "red", "dyer": "green"}
CIRCULAR = "circular"
LETTERS = 16
SPARE = 8


class Mailroom(Env):
    """Rewards each letter that is filed right, on the turn that did it, with its share of the pile."""

    score_range = (0.0, 1.0)
    default_tasks = f"{__file__}:tasks"

    def reset(self, task=None, *, seed=None):
        rng = random.Random(seed)
        real = rng.choices(list(TRADES), k=LETTERS - LETTERS // 4)
        pile = real + [CIRCULAR] * (LETTERS // 4)
        rng.shuffle(pile)
        self.pile = deque(pile)
        self.left = LETTERS + SPARE
        return self.shown(), {"state": self.state()}

    def step(self, action):
        letter, tray = self.pile.popleft(), text_of(action).strip()
        right = tray in TRAYS if letter == CIRCULAR else tray == TRADES[letter]
        if not right:
            self.pile.append(letter)
        self.left -= 1
        # A circular is filed as well, but nothing depends on where: it is worth nothing.
        reward = float(right and letter != CIRCULAR) / (LETTERS - LETTERS // 4)
        if not self.pile:
            return StepResult("", reward, True, False, {})
        if not self.left:
            return StepResult("", reward, False, True, {})
        observation = [*refuse_calls(action), {"role": "user", "content": self.shown()}]
        return StepResult(observation, reward, False, False, {"state": self.state()})

    def shown(self) -> str:
        """The description of the letter on top."""
        return f"From the {self.pile[0]}."

    def state(self) -> str:
        """What the next move depends on: credit by groups of steps compares turns that began in the same state."""
        return self.pile[0]


def tasks(n: int = 200, *, name: str = "mail") -> Iterator[Task]:
    """Yield ``n`` piles. Their letters are drawn when an episode resets."""
    for index in range(n):
        yield Task(f"{name}-{index}", "File the letters.")
