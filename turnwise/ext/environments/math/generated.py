"""Generated word problems in GSM8K's format, with every calculation marked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from turnwise.errors import TaskError
from turnwise.seeding import stable_hash
from turnwise.tools.arithmetic import evaluate, write_number

SPLITS: Final = ("train", "test")
_NAMES: Final = "Amara Bela Chidi Dara Emil Farah Goran Hana Imani Jonas Kaya Luis".split()  # noqa: SIM905
_THINGS: Final = "apples beads cards marbles pencils shells stamps stickers".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class _Template:
    """A question, the range of each number, and the calculations; ``{r1}`` is the first result."""

    question: str
    numbers: dict[str, range]
    steps: tuple[str, ...]


_TEMPLATES: Final = (
    _Template(
        "{name} buys {a} boxes with {b} {thing} in each, and gives {c} {thing} away. How many {thing} are left?",
        {"a": range(2, 20), "b": range(3, 40), "c": range(2, 60)},
        ("{a}*{b}", "{r1}-{c}"),
    ),
    _Template(
        "A ticket costs ${a} for a child and ${b} for an adult. {name} buys tickets for {c} children and {d} adults. "
        "How many dollars is that?",
        {"a": range(3, 15), "b": range(8, 30), "c": range(2, 9), "d": range(2, 9)},
        ("{c}*{a}", "{d}*{b}", "{r1}+{r2}"),
    ),
    _Template(
        "{name} reads {a} pages on each day from Monday to Friday, and {b} pages on each day of the weekend. How many "
        "pages does {name} read in {c} weeks?",
        {"a": range(5, 40), "b": range(5, 80), "c": range(2, 12)},
        ("5*{a}", "2*{b}", "{r1}+{r2}", "{r3}*{c}"),
    ),
    _Template(
        "A coat costs ${a}. In the sale it is {b}% cheaper, and {name} has a voucher for another ${c}. How many "
        "dollars does {name} pay?",
        {"a": range(40, 400, 10), "b": range(10, 60, 5), "c": range(3, 20)},
        ("{a}*{b}%", "{a}-{r1}", "{r2}-{c}"),
    ),
    _Template(
        "{name} earns ${a} an hour, worked {b} hours last week, and this week {c} hours more than last week. How many "
        "dollars did {name} earn in both weeks?",
        {"a": range(9, 40), "b": range(10, 40), "c": range(2, 12)},
        ("{b}+{c}", "{b}+{r1}", "{r2}*{a}"),
    ),
    _Template(
        "{a} {thing} are shared equally among {b} children. Each of them loses {c}. How many {thing} has each child "
        "now?",
        {"a": range(24, 400), "b": range(3, 13), "c": range(2, 9)},
        ("{a}/{b}", "{r1}-{c}"),
    ),
    _Template(
        "A tank holds {a} litres and is empty. A pump adds {b} litres every minute, but {c} litres leak out every "
        "minute. After how many minutes is the tank full?",
        {"a": range(60, 900, 10), "b": range(12, 50), "c": range(2, 10)},
        ("{b}-{c}", "{a}/{r1}"),
    ),
    _Template(
        "{name} has {a} {thing}. A friend has {b} times as many, and a cousin has {c} fewer than the friend. How many "
        "{thing} have the three together?",
        {"a": range(6, 40), "b": range(2, 8), "c": range(3, 11)},
        ("{a}*{b}", "{r1}-{c}", "{a}+{r1}", "{r3}+{r2}"),
    ),
    _Template(
        "The way to the coast is {d} km. {name} drives {a} km in the first hour and {b} km in each of the {c} hours "
        "after it. How many km are left?",
        {"a": range(40, 90), "b": range(40, 110), "c": range(2, 6), "d": range(300, 900, 5)},
        ("{b}*{c}", "{a}+{r1}", "{d}-{r2}"),
    ),
    _Template(
        "{name} saves ${a} a week for {b} weeks and spends {c}% of it on a present. How many dollars are left?",
        {"a": range(10, 80), "b": range(4, 30), "c": range(10, 60, 5)},
        ("{a}*{b}", "{r1}*{c}%", "{r1}-{r2}"),
    ),
)


def generated_rows(n: int, *, split: str, seed: int) -> Iterator[tuple[str, str]]:
    """Yield ``n`` questions with solutions: sentences with ``<<12*3=36>>``, ending in ``#### 36``."""
    if split not in SPLITS:
        raise TaskError(f"math has no split {split!r}: {', '.join(SPLITS)}; for your own rows give path=FILE.jsonl")
    for index in range(n):
        rng = random.Random(stable_hash("math", split, seed, index))
        while True:
            row = _draw_problem(rng)
            if row is not None and (stable_hash(row[0]) % 4 == 0) == (split == "test"):
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
