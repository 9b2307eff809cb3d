"""Picture environment: a question about a board of coloured squares that only a tool's picture shows."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import ClassVar, Final

from turnwise.envs.core import ResetResult, Solution
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import MissingExtraError, TaskError
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.tools.response import ToolResponse
from turnwise.types import Message, text_of

COLOURS: Final = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 80, 220),
    "yellow": (235, 215, 50),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
PLACES: Final = ("top left", "top right", "bottom left", "bottom right")
SPLITS: Final = ("train", "test")
SIDE: Final = 16
"""Pixels of the side of a square."""


def board(seed: int, *, split: str = "train") -> tuple[str, ...]:
    """Draw the colours of the squares, by place; about a quarter of all boards are ``test``."""
    if split not in SPLITS:
        raise TaskError(f"picture has no split={split!r}: splits are {', '.join(SPLITS)}")
    rng = random.Random(stable_hash("picture", seed))
    while True:
        colours = tuple(rng.choices(list(COLOURS), k=len(PLACES)))
        if (stable_hash(*colours) % 4 == 0) == (split == "test"):
            return colours


def draw(colours: tuple[str, ...]) -> bytes:
    """Return the picture of a board as PNG. Raises MissingExtraError without Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision", "the environment picture") from error
    picture = Image.new("RGB", (2 * SIDE, 2 * SIDE))
    for number, colour in enumerate(colours):
        left, top = number % 2 * SIDE, number // 2 * SIDE
        picture.paste(COLOURS[colour], (left, top, left + SIDE, top + SIDE))
    with io.BytesIO() as file:
        picture.save(file, format="PNG")
        return file.getvalue()


class PictureEnv(ToolEnv):
    """Asks for the colour of one square: look at the picture, then answer with one word."""

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.envs.library.picture:tasks"

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Draw a board from the seed; the task may name the place and the split."""
        data = {} if task is None else task.data
        seed = random.getrandbits(63) if seed is None else seed
        self.colours = board(seed, split=data.get("split", "train"))
        self.place = data.get("place") or random.Random(seed).choice(PLACES)
        if self.place not in PLACES:
            raise TaskError(f"picture has no place={self.place!r}: places are {', '.join(PLACES)}")
        return question(self.place), {}

    @property
    def answer(self) -> str:
        """The colour in question."""
        return self.colours[PLACES.index(self.place)]

    @function_tool(inline=True, media=("image",))
    def look(self) -> ToolResponse:
        """The picture of the board."""
        return ToolResponse(image=[draw(self.colours)])

    def score(self, final: Message | None) -> float:
        """1 for exactly the colour's name, else 0."""
        return float(final is not None and text_of(final).strip() == self.answer)

    def solve(self) -> Solution:
        """Look, then say the colour."""
        yield tool_call("look")
        yield self.answer


def question(place: str) -> str:
    """Return the question for a place."""
    return f"Which colour is {place}?"


def tasks(n: int = 200, *, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Yield ``n`` questions of a split; their boards are drawn at reset."""
    for index in range(n):
        place = PLACES[stable_hash("picture", split, seed, index) % len(PLACES)]
        yield Task(f"picture-{split}-{seed}-{index}", question(place), {"place": place, "split": split})
