"""Texts whose words are to be written in reverse order: the smallest example of prime-rl, for a model of 135 M."""

from __future__ import annotations

import random
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import ClassVar

from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.errors import TaskError
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.types import Message, text_of

WORDS = (  # noqa: SIM905
    "apple bread bridge butter candle castle chair cloud coffee corner cotton desert doctor dragon engine family "
    "farmer finger flower forest friend garden ghost glass grass hammer honey horse house island jacket jungle "
    "kitchen ladder lemon letter market metal milk mirror money moon mother mountain mouse music needle ocean "
    "office orange paper pencil picture planet pocket police potato prince rabbit radio river road school shadow "
    "silver sister soldier spring star station stone storm street summer sugar table teacher tiger train tree "
    "valley village wall water weather window winter wolf wood yellow"
).split()
SYSTEM = "Answer with words alone."


class ReverseText(SingleTurnEnv):
    """Pays how much of the reversed text an answer has, in the right order: a ratio in [0, 1], 1 for all of it."""

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = f"{__file__}:tasks"

    async def score(self, final: Message | None) -> float:
        """Compare the answer with the reversed text, word by word."""
        answer = text_of(final or {}).split()
        return SequenceMatcher(None, answer, self.task.data["answer"].split(), autojunk=False).ratio()


def tasks(n: int = 200, *, split: str = "train", seed: int = 0, shortest: int = 4, longest: int = 7) -> Iterator[Task]:
    """Yield ``n`` texts of a split, of ``shortest`` to ``longest`` different words."""
    if not 1 <= shortest <= longest <= len(WORDS):
        raise TaskError(f"shortest is {shortest} and longest {longest}: give 1 <= shortest <= longest <= {len(WORDS)}")
    rng = random.Random(stable_hash("reverse text", split, seed))
    for index in range(n):
        words = rng.sample(WORDS, rng.randint(shortest, longest))
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Write these words in reverse order: {' '.join(words)}"},
        ]
        yield Task(f"reverse-{split}-{seed}-{index}", messages, {"answer": " ".join(reversed(words))})
