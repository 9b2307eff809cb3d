"""Generated word problems in GSM8K's format, with every calculation marked."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from typing import Final

from turnwise.errors import TaskError
from turnwise.ext.environments.arithmetic import evaluate, write_number
from turnwise.seeding import stable_hash
from turnwise.tasks.seeded import SPLITS, in_split

_NAMES: Final = "Amara Bela Chidi Dara Emil Farah Goran Hana Imani Jonas Kaya Luis".split()  # noqa: SIM905
_THINGS: Final = "apples beads cards marbles pencils shells stamps stickers".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class _Template:
    """A question, the range of each number, and the calculations; ``{r1}`` is the first result."""

    question: str
    numbers: dict[str, range]
    steps: tuple[str, ...]


def _read_templates() -> tuple[_Template, ...]:
    file = resources.files("turnwise.ext.environments.math") / "shipped" / "templates.toml"
    return tuple(
        _Template(
            " ".join(record["question"].split()),
            {name: range(*limits) for name, limits in record["numbers"].items()},
            tuple(record["steps"]),
        )
        for record in tomllib.loads(file.read_text("utf-8"))["templates"]
    )


_TEMPLATES: Final = _read_templates()


def generated_rows(n: int, *, split: str, seed: int) -> Iterator[tuple[str, str]]:
    """Yield ``n`` questions with solutions: sentences with ``<<12*3=36>>``, ending in ``#### 36``."""
    if split not in SPLITS:
        raise TaskError(f"math has no split {split!r}: {', '.join(SPLITS)}; for your own rows give path=FILE.jsonl")
    for index in range(n):
        rng = random.Random(stable_hash("math", split, seed, index))
        while True:
            row = _draw_problem(rng)
            if row is not None and in_split(split, row[0]):
                yield row
                break


def _draw_problem(rng: random.Random) -> tuple[str, str] | None:
    """Draw a problem; None where a result is not a positive integer, or occurs in the question."""
    template = rng.choice(_TEMPLATES)
    numbers = {key: rng.choice(values) for key, values in template.numbers.items()}
    words = {"name": rng.choice(_NAMES), "thing": rng.choice(_THINGS)}
    operands = {key: str(value) for key, value in numbers.items()}
    lines: list[str] = []
    value = Fraction(0)
    for count, step in enumerate(template.steps, 1):
        expression = step.format(**operands)
        value = evaluate(expression)
        if value.denominator != 1 or value <= 0:
            return None
        operands[f"r{count}"] = write_number(value)
        lines.append(f"{expression} = <<{expression}={write_number(value)}>>{write_number(value)}")
    if value in numbers.values():
        return None
    return template.question.format(**words, **numbers), "\n".join([*lines, f"#### {write_number(value)}"])
