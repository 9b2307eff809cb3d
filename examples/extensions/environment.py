r"""An environment whose world is a folder: each row brings its files, which stand in a sandbox, and asks about them.

    turnwise check-env examples/extensions/environment.py:Folder --tool-config-path examples/extensions/tools.yaml

A row is ``{"prompt": ..., "files": {"a.txt": "..."}, "answer": ...}``. Tools that work in the sandbox come from the
configuration (``tools: [shell, submit]``, or ``tool.py`` beside this file), and so does what an answer is worth
(``scorer``; ``reward.py``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise import Task, ToolEnv, register
from turnwise.envs.core import Solution
from turnwise.envs.rewards import as_rubric
from turnwise.errors import EnvError
from turnwise.sandboxes import SandboxSpec
from turnwise.types import Message

_NAMES = ("apples", "bread", "candles", "dates", "eggs", "figs", "grapes", "honey")


@register("folder")
class Folder(ToolEnv):
    """Writes the files of a row into a sandbox, asks its question, and scores the answer.

    Args:
        scorer: As for ``single_turn``: a reward function, or named parts; by default the answer itself is expected.
    """

    score_range = (0.0, 1.0)
    default_tasks = f"{__file__}:tasks?n=20&split=test"

    def __init__(self, scorer: str | Mapping[str, Any] = "exact_match") -> None:
        self._rubric = as_rubric(scorer)

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        files = None if task is None else task.data.get("files")
        if task is None or not isinstance(files, Mapping):
            name = "no task" if task is None else f"task {task.id!r}"
            raise EnvError(f"environment 'folder': {name} has no files: give the row a column 'files', name to text")
        self.task = task
        box = await self.open_sandbox(SandboxSpec())
        for name, text in files.items():
            await box.write_file(name, text.encode())
        return task.messages(), {}

    async def score(self, final: Message | None) -> Any:
        return await self._rubric.score(self, self.task, final)

    def solve(self) -> Solution:
        yield str(self.task.data["answer"])


def tasks(n: int, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield ``n`` rows: price lists of three shops, and what one thing costs in one of them."""
    for number in range(n):
        draw = random.Random(f"{split}-{number}")
        shops = {
            f"shop{shop}.txt": {name: draw.randint(10, 99) for name in draw.sample(_NAMES, 4)} for shop in (1, 2, 3)
        }
        shop, prices = draw.choice(sorted(shops.items()))
        product = draw.choice(sorted(prices))
        yield {
            "id": f"{split}-{number}",
            "prompt": f"What is the price of {product} in {shop}? Answer with the number.",
            "files": {name: "".join(f"{k}: {v}\n" for k, v in stock.items()) for name, stock in shops.items()},
            "about": product,
            "answer": str(prices[product]),
        }
