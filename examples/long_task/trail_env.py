"""Trail environment: many dependent tool calls with long results."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.envs.core import ResetResult, Solution
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, TaskError, ToolError, shown
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tasks.seeded import check_split, in_split
from turnwise.tools.core import function_tool
from turnwise.types import Message, text_of

PLACES = (  # noqa: SIM905
    "abbey barn castle dock elm forge gate harbour inn jetty knoll lodge mill nook orchard pier "
    "quarry ridge shrine tower upland vale well yard"
).split()
WORDS = (  # noqa: SIM905
    "grass stone wind moss rain cloud path hill leaf bird snow dust mud sky fern root sand creek bark thorn "
    "mist frost hedge nettle clover reed heath pebble shade brook"
).split()


@dataclass(frozen=True, slots=True)
class Trail:
    """The places of a trail's signs in order, and its end."""

    places: tuple[str, ...]
    end: str


def trail(seed: int, *, steps: int = 8, split: str = "train") -> Trail:
    """Draw a trail; about a quarter of all are ``test``."""
    rng = random.Random(stable_hash("trail", seed))
    while True:
        path: list[str] = []
        while len(path) <= steps:
            # A long trail comes by a place again, but never while its sign is still in sight.
            free = [place for place in PLACES if place not in path[-(len(PLACES) // 2) :]]
            path.append(rng.choice(free))
        if in_split(split, *path):
            return Trail(tuple(path[:-1]), path[-1])


class TrailEnv(ToolEnv):
    """Asks where a trail ends; each sign names the next place."""

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "trail_env:tasks"

    def __init__(self, steps: int = 8, words: int = 20) -> None:
        """Set the defaults of trails."""
        _check(EnvError, "steps", steps, 1)
        _check(EnvError, "words", words, 0)
        self.steps, self.words = steps, words

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Draw a trail from the seed; the task may set steps, words and split."""
        data = {} if task is None else task.data
        steps, words, split = data.get("steps", self.steps), data.get("words", self.words), data.get("split", "train")
        _check(TaskError, "steps", steps, 1)
        _check(TaskError, "words", words, 0)
        check_split("trail", split)
        seed = random.getrandbits(63) if seed is None else seed
        self.trail = trail(seed, steps=steps, split=split)
        rng = random.Random(stable_hash("signs", seed))
        self.signs = [_sign(self.trail, number, rng, words) for number in range(steps)]
        self.reached = 0
        return f"A trail begins at {self.trail.places[0]}. Where does it end?", {}

    @function_tool(inline=True)
    def read_sign(self, place: str) -> str:
        """What the sign at a place says, if the trail has led there."""
        ahead = self.trail.places[self.reached : self.reached + 1]
        if place in ahead:
            self.reached += 1
            return self.signs[self.reached - 1]
        # Signs that were read can be read again; of a place that the trail came by twice it is the last one.
        for number in range(self.reached - 1, -1, -1):
            if self.trail.places[number] == place:
                return self.signs[number]
        raise ToolError(f"the trail has not led to {place!r} yet")

    def score(self, final: Message | None) -> float:
        """1 for exactly the place where it ends, if all signs were read, else 0."""
        right = final is not None and text_of(final).strip() == self.trail.end
        return float(right and self.reached == len(self.trail.places))

    def solve(self) -> Solution:
        """Read one sign after the other."""
        for place in self.trail.places:
            yield tool_call("read_sign", place=place)
        yield self.trail.end


def _sign(path: Trail, number: int, rng: random.Random, words: int) -> str:
    filler = " ".join(rng.choice(WORDS) for _ in range(words))
    is_last = number + 1 == len(path.places)
    end = f"The trail ends at {path.end}" if is_last else f"Go on to {path.places[number + 1]}"
    mile = f"mile {rng.randint(10, 99)}"
    return f"{filler}, {mile}. {end}." if filler else f"{mile}. {end}."


def _check(error: type[EnvError | TaskError], name: str, value: Any, minimum: int) -> None:
    if type(value) is not int or value < minimum:
        raise error(f"trail: {name} is {shown(value)}: it must be a whole number of at least {minimum}")


def tasks(
    n: int = 200, *, split: str = "train", seed: int = 0, steps: int = 8, least: int | None = None, words: int = 20
) -> Iterator[Task]:
    """Yield ``n`` trails of a split, drawn at reset.

    Args:
        n: Number of tasks.
        split: ``train`` or ``test``.
        seed: Determines the trails.
        steps: Signs of a trail.
        least: Signs of the shortest trail, where lengths are drawn uniformly up to ``steps``.
        words: Filler words on a sign.
    """
    check_split("trail", split)
    _check(TaskError, "steps", steps, 1)
    _check(TaskError, "words", words, 0)
    least = steps if least is None else least
    _check(TaskError, "least", least, 1)
    if least > steps:
        raise TaskError(f"trail: least is {least}, more than steps({steps})")
    for index in range(n):
        length = least + stable_hash("trail steps", split, seed, index) % (steps - least + 1)
        question = "Where does the trail end?"
        yield Task(f"trail-{split}-{seed}-{index}", question, {"steps": length, "words": words, "split": split})
