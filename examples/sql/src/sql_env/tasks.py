"""SQL tasks: questions over generated databases, with gold queries."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Final

from sql_env.database import Database, create_database
from sql_env.gold import MOST_ROWS, is_informative
from sql_env.schemas import SCHEMAS
from turnwise.errors import TaskError, shown
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tasks.seeded import check_split, in_split

_PER_DATABASE: Final = 20


def tasks(n: int = 200, *, split: str = "train", seed: int = 0, schema: str | None = None) -> Iterator[Task]:
    """Yield ``n`` questions of a split, twenty to a database, schemas and templates in turn.

    Args:
        n: Number of tasks.
        split: ``train`` or ``test``.
        seed: Determines the databases.
        schema: Only this kind of database: ``shop``, ``school``, ``library`` or ``flights``.
    """
    check_split("sql", split)
    if schema is not None and schema not in SCHEMAS:
        raise TaskError(f"sql has no schema {shown(schema)}: it has {', '.join(SCHEMAS)}")
    names = tuple(SCHEMAS) if schema is None else (schema,)
    for start in range(0, n, _PER_DATABASE):
        database_number = start // _PER_DATABASE
        name, database = names[database_number % len(names)], stable_hash("sql database", split, seed, database_number)
        with closing(create_database(name, database)) as rows:
            for index in range(start, min(n, start + _PER_DATABASE)):
                question, gold = _question(rows, name, split, database, index)
                yield _task(f"sql-{split}-{seed}-{index}", name, database, question, gold)


def draw_task(seed: int | None) -> Task:
    """Return the task drawn from a seed; a random one for None."""
    number = random.getrandbits(63) if seed is None else seed
    name, database = list(SCHEMAS)[number % len(SCHEMAS)], stable_hash("sql database", "train", number, 0)
    with closing(create_database(name, database)) as rows:
        question, gold = _question(rows, name, "train", database, number // len(SCHEMAS))
    return _task(f"sql-seed-{number}", name, database, question, gold)


def _task(name: str, schema: str, database: int, question: str, gold: str) -> Task:
    return Task(name, question, {"schema": schema, "database": database, "gold": gold})


def _question(rows: Database, schema: str, split: str, database: int, index: int) -> tuple[str, str]:
    rng = random.Random(stable_hash("sql task", schema, split, database, index))
    by_template = _questions(schema, split)
    # A question may have an empty answer in these rows; then other gaps or the next template are tried.
    candidates = (rng.choice(by_template[turn % len(by_template)]) for turn in itertools.count(index))
    return next(pair for pair in candidates if is_informative(rows.query(pair[1], most_rows=MOST_ROWS)))


@functools.cache
def _questions(schema: str, split: str) -> list[list[tuple[str, str]]]:
    """Return the questions of a split, by template, without empty ones."""
    by_template = [
        [pair for pair in template.filled() if in_split(split, "sql", schema, pair[1])]
        for template in SCHEMAS[schema].templates
    ]
    return [pairs for pairs in by_template if pairs]
