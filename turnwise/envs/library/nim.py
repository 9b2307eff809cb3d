"""Nim with one heap: two players take stones by turns, and who takes the last one wins."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, Literal, get_args

from turnwise.envs.core import Solution
from turnwise.envs.multi_agent import MultiAgentEnv
from turnwise.errors import EnvError, TaskError, shown
from turnwise.tasks import Task
from turnwise.types import Message, text_of

Opponent = Literal["perfect", "random"]
"""``perfect`` never lets a won game go, and takes one stone where it has lost; ``random`` takes any allowed number."""

_NUMBER: Final = re.compile(r"(?<![0-9.])[-+]?[0-9]{1,9}(?!\.?[0-9])")
SIDES: Final = ("first", "second")


class NimEnv(MultiAgentEnv):
    """1 for who takes the last stone, 0 for the other; an answer that is no allowed move loses.

    Without ``opponent`` two agents play, ``first`` and ``second``. With it, one, ``main``, plays against the
    environment.

    Attributes:
        stones: How many are left.
        winner: Who won, as far as the game is over.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.envs.library.nim:tasks"

    def __init__(self, least: int = 5, most: int = 20, take: int = 3, opponent: Opponent | None = None) -> None:
        """Say how large heaps are and who plays.

        Args:
            least: The smallest heap that a game begins with.
            most: The largest.
            take: How many stones one may take at once.
            opponent: Plays the other side of ``main``; None where two agents play.

        Raises:
            EnvError: There are no such games, or there is no such opponent.
        """
        # So large that nobody ends it with the first move.
        for name, value, low in (("take", take, 1), ("least", least, take + 1), ("most", most, least)):
            if type(value) is not int or not low <= value <= 10**6:
                raise EnvError(f"nim: {name} is {shown(value)}: it must be a whole number from {low} to 1000000")
        if opponent is not None and opponent not in get_args(Opponent):
            raise EnvError(f"nim: opponent is {shown(opponent)}: it must be one of {', '.join(get_args(Opponent))}")
        self.least, self.most, self.take, self.opponent = least, most, take, opponent
        self.agents = SIDES if opponent is None else ("main",)
        self.stones, self.winner = 0, ""

    def begin(self, task: Task | None, seed: int | None) -> str:
        """Lay the heap: the task's ``data["stones"]``, or as many as are drawn from the seed.

        Against an opponent the task's ``data["side"]`` says who begins. Without it a game against a perfect one is such
        that it can be won, and else the seed decides.

        Raises:
            TaskError: The task names no heap that can be played, or no side.
        """
        data = {} if task is None else task.data
        name = None if task is None else task.id
        self._rng = random.Random(seed)
        drawn, side = self._rng.randint(self.least, self.most), self._rng.choice(SIDES)
        drawn = self.stones = data.get("stones", drawn)
        if type(self.stones) is not int or not 1 <= self.stones <= 10**6:
            raise TaskError(f"task {name!r}: data['stones'] is {shown(self.stones)}: it must be a whole number above 0")
        if self.opponent == "perfect":
            side = SIDES[drawn % (self.take + 1) == 0]
        side = data.get("side", side)
        if side not in SIDES:
            raise TaskError(f"task {name!r}: data['side'] is {shown(side)}: it must be first or second")
        self.winner = ""
        rules = f"Take 1 to {self.take} stones. Who takes the last one wins. Answer with a number."
        if self.opponent is None:
            self.tell("first", f"{rules} {self.stones} are left.")
            self.tell("second", rules)
            return "first"
        self.tell("main", rules)
        self.tell("main", f"{self.stones} are left." if side == "first" else self._reply())
        if self.winner:
            raise TaskError(f"task {name!r}: the opponent takes all {drawn} stones at once: name more of them")
        return "main"

    def move(self, agent: str, message: Message) -> str | None:
        """Take stones from the heap."""
        taken = chosen(text_of(message))
        other = "opponent" if self.opponent else SIDES[agent == "first"]
        if taken is None or not 1 <= taken <= min(self.take, self.stones):
            self.winner = other
            return None
        self.stones -= taken
        if not self.stones:
            self.winner = agent
            return None
        if self.opponent is None:
            self.tell(other, f"{self.stones} are left.")
            return other
        said = self._reply()
        self.tell(agent, said)
        return None if self.winner else agent

    def payoff(self) -> Mapping[str, float]:
        """1 for the winner; where a limit ended the game, for the one whose turn it was not."""
        lost = self.turn if not self.winner else None
        return {name: float(name != lost if lost else name == self.winner) for name in self.agents}

    def solve(self) -> Solution:
        """Take what leaves a multiple of ``take + 1``; with one mind on both sides, whoever can win wins."""
        while not self.winner:
            yield str(best(self.stones, self.take))

    def _reply(self) -> str:
        """Let the opponent move; return what is said of it."""
        perfect = best(self.stones, self.take)
        taken = perfect if self.opponent == "perfect" else self._rng.randint(1, min(self.take, self.stones))
        self.stones -= taken
        if not self.stones:
            self.winner = "opponent"
        return f"{self.stones} are left."


def chosen(text: str) -> int | None:
    """Return the number that an answer names: the only one in it."""
    numbers = _NUMBER.findall(text)
    return int(numbers[0]) if len(numbers) == 1 else None


def best(stones: int, take: int) -> int:
    """Return how many stones to take: what leaves the other a lost heap, else one."""
    return stones % (take + 1) or 1


def tasks(n: int = 1000, *, name: str = "train", opponent: Opponent | None = None) -> Iterator[Task]:
    """Yield games whose heaps are drawn when they begin.

    Args:
        n: How many.
        name: First part of the ids. Other names give other seeds: ``train`` to train on, ``test`` held out.
        opponent: Plays the other side, whatever the run's own environment is configured to.

    Raises:
        TaskError: ``n`` is no positive number, or there is no name.
    """
    if n < 1 or not name:
        raise TaskError(f"nim tasks: n={n!r}, name={name!r}: n must be at least 1, and name a text that is not empty")
    config = {} if opponent is None else {"opponent": opponent}
    for index in range(n):
        yield Task(f"nim-{name}-{index}", "", env_config=config)
