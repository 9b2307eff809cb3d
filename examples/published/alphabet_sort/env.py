"""Words to be sorted, some more in each of three turns: alphabet-sort of prime-rl, for a model of 135 M."""

from __future__ import annotations

import random
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import ClassVar

from turnwise.envs.core import Env, ResetResult, Solution, StepResult
from turnwise.errors import EnvError
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tools.response import refuse_calls
from turnwise.types import Message, text_of

NAMES = (  # noqa: SIM905
    "Adam Alice Anna Ben Brian Carl Clara David Diana Edward Emma Frank Fiona George Grace Harry Helen Ivan "
    "Isabel Jack Julia Karl Kate Leo Laura Mark Mary Nick Nora Oliver Olga Paul Peter Quentin Robert Rosa Sam "
    "Sarah Thomas Tina Ursula Victor Vera William Wendy Yves Yvonne Zack Zoe"
).split()
SYSTEM = "Answer with names alone."
SIZES = (3, 1, 1)
"""Names that each turn adds."""


class AlphabetSort(Env):
    """Adds names in each turn and asks for all of them in order; pays each turn's share of names in the right order."""

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = f"{__file__}:tasks"

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Ask for the first names in order."""
        self.task = next(tasks(1, seed=seed or 0)) if task is None else task
        self.turn, self.ratios = 0, list[float]()
        return [{"role": "system", "content": SYSTEM}, self._request()], {}

    @property
    def names(self) -> list[str]:
        """The names of all turns so far, in order."""
        additions: list[list[str]] = self.task.data["names"]
        return sorted(name for names in additions[: self.turn + 1] for name in names)

    def step(self, action: Message) -> StepResult:
        """Compare an answer, and add the next names."""
        additions = self.task.data["names"]
        if self.turn >= len(additions):
            raise EnvError("alphabet_sort: no episode runs: call reset() first")
        self.ratios.append(SequenceMatcher(None, text_of(action).split(), self.names, autojunk=False).ratio())
        self.turn += 1
        ended = self.turn == len(additions)
        observation = [*refuse_calls(action), *([] if ended else [self._request()])]
        return StepResult(observation, self.ratios[-1] / len(additions), ended, False, {})

    def score(self, final: Message | None) -> float:
        """The mean over all turns; turns that were not reached count 0."""
        return sum(self.ratios) / len(self.task.data["names"])

    def solve(self) -> Solution:
        """Answer each turn with the sorted names."""
        for _ in self.task.data["names"]:
            yield " ".join(self.names)

    def _request(self) -> Message:
        names = " ".join(self.task.data["names"][self.turn])
        text = f"Sort by the alphabet: {names}" if self.turn == 0 else f"Add and sort all: {names}"
        return {"role": "user", "content": text}


def tasks(n: int = 200, *, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Yield ``n`` tasks of a split."""
    rng = random.Random(stable_hash("alphabet sort", split, seed))
    for index in range(n):
        names = rng.sample(NAMES, sum(SIZES))
        additions = [names[sum(SIZES[:turn]) :][:size] for turn, size in enumerate(SIZES)]
        yield Task(f"sort-{split}-{seed}-{index}", "", {"names": additions})
