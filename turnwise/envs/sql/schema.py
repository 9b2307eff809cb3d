"""What a database is made from, and what can be asked of it.

Owns: :class:`Schema`, :class:`Template` and the names that rows are made of. Refuses: SQLite; ``database.py`` has it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, Final, TypeAlias

Rows: TypeAlias = dict[str, list[tuple[Any, ...]]]
"""The rows of each table, in the order of its columns."""

FIRST_NAMES: Final = (  # noqa: SIM905
    "Agnes Bruno Celia Dario Edith Fabio Greta Henrik Irma Jakob Karin Leon Mona Nico Odile Paolo Rita Samir Tessa Ugo "
    "Vera Willem Yara Zeno"
).split()
LAST_NAMES: Final = (  # noqa: SIM905
    "Adler Bauer Costa Duarte Engel Ferri Gomez Holm Iversen Jung Kraus Lopes Marin Nagy Olsen Prado Reyes Sato Torres "
    "Urban Vidal Wolff Young Zorn"
).split()


@dataclass(frozen=True, slots=True)
class Template:
    """A question with gaps.

    Attributes:
        question: What is asked; ``{name}`` is a gap.
        gold: The query that answers it, with the same gaps.
        gaps: What may stand in each gap.
    """

    question: str
    gold: str
    gaps: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def filled(self) -> Iterator[tuple[str, str]]:
        """Yield every question with its query."""
        for values in itertools.product(*self.gaps.values()):
            chosen = dict(zip(self.gaps, values, strict=True))
            yield self.question.format(**chosen), " ".join(self.gold.format(**chosen).split())


@dataclass(frozen=True, slots=True)
class Schema:
    """A kind of database.

    Attributes:
        name: What tasks call it.
        tables: ``CREATE TABLE`` statements.
        rows: Draws the rows.
        templates: What can be asked.
    """

    name: str
    tables: str
    rows: Callable[[random.Random], Rows]
    templates: tuple[Template, ...]


def people(rng: random.Random, count: int) -> list[str]:
    """Draw so many different names of persons."""
    pairs = rng.sample(range(len(FIRST_NAMES) * len(LAST_NAMES)), count)
    return [f"{FIRST_NAMES[pair // len(LAST_NAMES)]} {LAST_NAMES[pair % len(LAST_NAMES)]}" for pair in pairs]


def day(rng: random.Random, first: date, last: date) -> str:
    """Draw a date, in ISO form."""
    return (first + timedelta(days=rng.randint(0, (last - first).days))).isoformat()


def titles(rng: random.Random, count: int, adjectives: Sequence[str], nouns: Sequence[str]) -> list[str]:
    """Draw so many different titles of two words."""
    pairs = rng.sample(range(len(adjectives) * len(nouns)), count)
    return [f"{adjectives[pair // len(nouns)]} {nouns[pair % len(nouns)]}" for pair in pairs]
