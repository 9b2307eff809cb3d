"""Nim with one heap: the player who takes the last stone wins."""

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
    """1 for the player who takes the last stone, 0 for the other; an invalid move loses.

    Two agents play, ``first`` and ``second``; with ``opponent`` one, ``main``, plays against the environment.

    Attributes:
        winner: The winner, once the game is over.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "nim_env:tasks"

    def __init__(self, least: int = 5, most: int = 20, take: int = 3, opponent: Opponent | None = None) -> None:
        """Set heap sizes and players.

        Args:
            least: Smallest initial heap.
            most: Largest initial heap.
            take: Most stones of a move.
            opponent: Strategy of ``main``'s opponent; None where two agents play.
        """
        # So large that the first move cannot end it.
        for name, value, low in (("take", take, 1), ("least", least, take + 1), ("most", most, least)):
            if type(value) is not int or not low <= value <= 10**6:
                raise EnvError(f"nim: {name} is {shown(value)}: it must be a whole number from {low} to 1000000")
        if opponent is not None and opponent not in get_args(Opponent):
            raise EnvError(f"nim: opponent is {shown(opponent)}: it must be one of {', '.join(get_args(Opponent))}")
        self.least, self.most, self.take, self.opponent = least, most, take, opponent
        self.agents = SIDES if opponent is None else ("main",)
        self.stones, self.winner = 0, ""

    def begin(self, task: Task | None, seed: int | None) -> str:
        """Lay the task's ``data["stones"]``, or a heap drawn from the seed.

        Against an opponent ``data["side"]`` says who begins. By default games against a perfect one can be won;
        otherwise the seed decides.
        """
        data = {} if task is None else task.data
        name = None if task is None else task.id
        self._rng = random.Random(seed)
        stones, side = self._rng.randint(self.least, self.most), self._rng.choice(SIDES)
        stones = self.stones = data.get("stones", stones)
        if type(self.stones) is not int or not 1 <= self.stones <= 10**6:
            raise TaskError(f"task {name!r}: data['stones'] is {shown(self.stones)}: it must be a whole number above 0")
        if self.opponent == "perfect":
            side = SIDES[stones % (self.take + 1) == 0]
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
            raise TaskError(f"task {name!r}: the opponent takes all {stones} stones at once: use more stones")
        return "main"

    def move(self, agent: str, message: Message) -> str | None:
        """Take stones from the heap."""
        stones = chosen(text_of(message))
        other = "opponent" if self.opponent else SIDES[agent == "first"]
        if stones is None or not 1 <= stones <= min(self.take, self.stones):
            self.winner = other
            return None
        self.stones -= stones
        if not self.stones:
            self.winner = agent
            return None
        if self.opponent is None:
            self.tell(other, f"{self.stones} are left.")
            return other
        observation = self._reply()
        self.tell(agent, observation)
        return None if self.winner else agent

    def payoff(self) -> Mapping[str, float]:
        """1 for the winner; nobody wins a game that a limit ended, since a player could wait for it."""
        return {name: float(name == self.winner) for name in self.agents}

    def solve(self) -> Solution:
        """Leave a multiple of ``take + 1``; playing both sides, the side that can win does."""
        while not self.winner:
            yield str(best(self.stones, self.take))

    def _reply(self) -> str:
        perfect = best(self.stones, self.take)
        stones = perfect if self.opponent == "perfect" else self._rng.randint(1, min(self.take, self.stones))
        self.stones -= stones
        if not self.stones:
            self.winner = "opponent"
        return f"{self.stones} are left."


def chosen(text: str) -> int | None:
    """Return the only number in an answer."""
    numbers = _NUMBER.findall(text)
    return int(numbers[0]) if len(numbers) == 1 else None


def best(stones: int, take: int) -> int:
    """Return the best move: to a lost heap for the other, else one stone."""
    return stones % (take + 1) or 1


def tasks(n: int = 1000, *, name: str = "train", opponent: Opponent | None = None) -> Iterator[Task]:
    """Yield games whose heaps are drawn at reset.

    Args:
        n: Number of tasks.
        name: Prefix of the ids, which determines the seeds: ``train`` to train on, ``test`` held out.
        opponent: Overrides the environment's ``opponent``.
    """
    if n < 1 or not name:
        raise TaskError(f"nim tasks: n={n!r}, name={name!r}: n must be at least 1, and name a non-empty string")
    config = {} if opponent is None else {"opponent": opponent}
    for index in range(n):
        yield Task(f"nim-{name}-{index}", "", env_config=config)
