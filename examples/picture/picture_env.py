"""Picture environment: a question about a bar chart that only a tool's picture shows."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from turnwise.envs.core import ResetResult, Solution
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import TaskError, requires_extra
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tasks.seeded import SPLITS, in_split
from turnwise.tools.core import function_tool
from turnwise.tools.response import ToolResponse
from turnwise.types import Message, text_of

COLOURS: Final = {"red": (250, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 250), "yellow": (250, 250, 0)}
HIGHEST: Final = 6

_SIDE, _GAP, _UNIT = 16, 2, 2
"""Pixels: the side of a bar's square of the picture, the space left and right of the bar, one unit of height."""
# Image processors map the middle of a channel's range to zero: on this ground a bar is all that a model is fed.
_GROUND: Final = (128, 128, 128)


@dataclass(frozen=True, slots=True)
class Chart:
    """Colours and heights of the bars, from left to right; each colour occurs once."""

    colours: tuple[str, ...]
    heights: tuple[int, ...]

    def height(self, colour: str) -> int:
        """Return the height of a colour's bar."""
        return self.heights[self.colours.index(colour)]


def chart(seed: int, *, split: str = "train") -> Chart:
    """Draw the chart of an episode; about a quarter of all charts are ``test``."""
    if split not in SPLITS:
        raise TaskError(f"picture has no split={split!r}: splits are {', '.join(SPLITS)}")
    rng = random.Random(stable_hash("picture", seed))
    while True:
        colours = tuple(rng.sample(list(COLOURS), k=len(COLOURS)))
        heights = tuple(rng.randint(1, HIGHEST) for _ in colours)
        if in_split(split, *colours, *heights):
            return Chart(colours, heights)


def draw(bars: Chart) -> bytes:
    """Return the picture of a chart as PNG, 64 by 16 pixels. Raises MissingExtraError without Pillow."""
    with requires_extra("pillow", "vision", "the environment picture"):
        from PIL import Image
    picture = Image.new("RGB", (len(bars.colours) * _SIDE, _SIDE), _GROUND)
    for number, (colour, height) in enumerate(zip(bars.colours, bars.heights, strict=True)):
        edge = number * _SIDE
        picture.paste(COLOURS[colour], (edge + _GAP, _SIDE - height * _UNIT, edge + _SIDE - _GAP, _SIDE))
    with io.BytesIO() as file:
        picture.save(file, format="PNG")
        return file.getvalue()


class PictureEnv(ToolEnv):
    """Asks for the height of one bar: look at the picture, then answer with the bar's colour and height."""

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "picture_env:tasks"

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Draw a chart from the seed; the task may name the bar and the split."""
        data = {} if task is None else task.data
        seed = random.getrandbits(63) if seed is None else seed
        self.chart = chart(seed, split=data.get("split", "train"))
        self.colour = data.get("colour") or random.Random(seed).choice(list(COLOURS))
        if self.colour not in COLOURS:
            raise TaskError(f"picture has no colour={self.colour!r}: colours are {', '.join(COLOURS)}")
        return question(self.colour), {}

    @property
    def answer(self) -> str:
        """The right answer, such as ``red 4``."""
        return describe_bar(self.chart, self.colour)

    @function_tool(inline=True, media=("image",))
    def look(self) -> ToolResponse:
        """The picture of the chart."""
        return ToolResponse(image=[draw(self.chart)])

    def score(self, final: Message | None) -> float:
        """1 for exactly colour and height, else 0."""
        return float(final is not None and text_of(final).strip() == self.answer)

    def solve(self) -> Solution:
        """Look, then say the height."""
        yield tool_call("look")
        yield self.answer


def describe_bar(bars: Chart, colour: str) -> str:
    """Return a bar as the answer names it: its colour and height."""
    return f"{colour} {bars.height(colour)}"


def question(colour: str) -> str:
    """Return the question for a bar."""
    return f"How high is the {colour} bar? Answer with its colour and height."


def tasks(n: int = 200, *, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Yield ``n`` questions of a split; their charts are drawn at reset."""
    names = list(COLOURS)
    for index in range(n):
        colour = names[stable_hash("picture", split, seed, index) % len(names)]
        yield Task(f"picture-{split}-{seed}-{index}", question(colour), {"colour": colour, "split": split})
