"""Questions of SQL tasks, and comparison of a query's result with the gold result."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from sql_env.database import Database, Result, create_database, open_file
from sql_env.schemas import SCHEMAS
from turnwise.errors import TaskError, ToolError, shown
from turnwise.seeding import stable_hash
from turnwise.tasks import Task

TOLERANCE: Final = 0.006
"""By how much a number may differ from one that is not an integer: as much as rounding to two decimals does."""

_FENCE: Final = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_NESTED: Final = re.compile(r"\([^()]*\)")
_QUOTED: Final = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*")

Row = tuple[Any, ...]


def submitted_query(text: str) -> str:
    """Return the query in a message: its last fenced block, or all of it."""
    blocks: list[str] = _FENCE.findall(text)
    return (blocks[-1] if blocks else text).strip().rstrip(";").strip()


def is_ordered(sql: str) -> bool:
    """Return whether a query sorts its result, at the top level."""
    text = _QUOTED.sub(" ", sql)
    while (shorter := _NESTED.sub(" ", text)) != text:
        text = shorter
    return re.search(r"\border\s+by\b", text, re.IGNORECASE) is not None


def same_result(result: Result, gold: Result, *, ordered: bool) -> bool:
    """Compare a result with the gold one: the same columns in order, whatever their names, and the same multiset of
    rows.

    Args:
        result: The submitted result.
        gold: The gold result.
        ordered: Whether row order counts.
    """
    if len(result.columns) != len(gold.columns) or len(result.rows) != len(gold.rows) or result.more != gold.more:
        return False
    if ordered:
        return all(_same_row(row, expected) for row, expected in zip(result.rows, gold.rows, strict=True))
    unmatched = sorted(result.rows, key=_rank)
    for row in sorted(gold.rows, key=_rank):
        # Sorted, the counterpart is nearly always the first one left.
        match = next((index for index, candidate in enumerate(unmatched) if _same_row(candidate, row)), None)
        if match is None:
            return False
        del unmatched[match]
    return True


def _same_row(row: Row, gold: Row) -> bool:
    return all(_same_value(value, expected) for value, expected in zip(row, gold, strict=True))


def _same_value(value: Any, gold: Any) -> bool:
    if isinstance(gold, float) and isinstance(value, (int, float)):
        return math.isclose(value, gold, rel_tol=1e-6, abs_tol=TOLERANCE)
    return type(value) in _ALIKE.get(type(gold), (type(gold),)) and bool(value == gold)


# 3.0 is 3; a text is never a number.
_ALIKE: Final[dict[type, Sequence[type]]] = {int: (int, float)}


def _rank(row: Row) -> tuple[Any, ...]:
    return tuple((_KIND.get(type(value), 3), 0 if value is None else value) for value in row)


_KIND: Final[dict[type, int]] = {type(None): 0, int: 1, float: 1, str: 2}


MOST_ROWS: Final = 5_000
"""Rows of a result that are compared."""
_MOST_DRAWS: Final = 50
_GOLD_STEPS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Question:
    """A question.

    Attributes:
        schema: The kind of generated database, or None for a file.
        database: The seed of its rows, or the file.
        check: The file of the second database; None: one is generated, or (for files) there is none.
    """

    schema: str | None
    database: int | str
    gold: str
    check: str | None = None

    def open(self, *, steps: int) -> Database:
        """Open the episode's database. Raises TaskError for a file that cannot be read."""
        return _open(self.schema, self.database, "data['database']", steps)


def question_of(task: Task) -> Question:
    """Parse the question of a task."""
    where = f"task {task.id!r}: data"
    schema, database = task.data.get("schema"), task.data.get("database")
    gold, check = task.data.get("gold"), task.data.get("check_database")
    if not isinstance(gold, str) or not gold.strip():
        raise TaskError(f"{where}['gold'] is {shown(gold)}: it must be the query that answers the question")
    if isinstance(database, str):
        if check is not None and not isinstance(check, str):
            raise TaskError(f"{where}['check_database'] is {shown(check)}: it must be a SQLite file, or be left out")
        question = Question(None, database, gold, check)
    else:
        if isinstance(database, bool) or not isinstance(database, int):
            raise TaskError(
                f"{where}['database'] is {shown(database)}: it must be a seed, or the path of a SQLite file"
            )
        if schema not in SCHEMAS:
            raise TaskError(f"{where}['schema'] is {shown(schema)}: the generated databases are {', '.join(SCHEMAS)}")
        question = Question(str(schema), database, gold)
    try:
        _answers(question)
    except ToolError as error:
        raise TaskError(f"{where}['gold'] fails: {error}: {shown(gold)}") from error
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from error
    return question


def is_right(question: Question, database: Database, sql: str) -> bool:
    """Return whether a query is right, on the episode's database and on the second one."""
    gold, other = _answers(question)
    ordered = is_ordered(question.gold)
    try:
        if not same_result(database.query(sql, most_rows=MOST_ROWS), gold, ordered=ordered):
            return False
        if other is None:
            return True
        seed_or_path, result = other
        with closing(_open(question.schema, seed_or_path, "the second database", database.steps)) as second:
            return same_result(second.query(sql, most_rows=MOST_ROWS), result, ordered=ordered)
    except ToolError:
        return False


@functools.lru_cache(maxsize=512)
def _answers(question: Question) -> tuple[Result, tuple[int | str, Result] | None]:
    """Return the gold result, and the second database with its gold result."""
    gold = _run(question, question.database, "data['database']")
    if gold.more:
        raise TaskError(f"data['gold'] returns more than {MOST_ROWS} rows, the maximum that is compared")
    if question.check is not None:
        return gold, (question.check, _run(question, question.check, "data['check_database']"))
    if question.schema is None or isinstance(question.database, str):
        return gold, None
    for attempt in range(_MOST_DRAWS):
        seed = stable_hash("sql check", question.database, attempt)
        other = _run(question, seed, "the second database")
        if is_informative(other) and not same_result(other, gold, ordered=False):
            return gold, (seed, other)
    raise TaskError(
        f"data['gold'] has the same result on {_MOST_DRAWS} different databases (or none): a query with that constant "
        f"would be right; ask for something that depends on the rows: {shown(question.gold)}"
    )


def _run(question: Question, seed_or_path: int | str, where: str) -> Result:
    with closing(_open(question.schema, seed_or_path, where, _GOLD_STEPS)) as database:
        return database.query(question.gold, most_rows=MOST_ROWS)


def _open(schema: str | None, seed_or_path: int | str, where: str, steps: int) -> Database:
    if isinstance(seed_or_path, str):
        return open_file(seed_or_path, where, steps=steps)
    assert schema is not None
    return create_database(schema, seed_or_path, steps=steps)


def is_informative(result: Result) -> bool:
    """Return whether a result is neither empty nor all zeros, which are too easy to guess."""
    return any(value not in (None, 0) for row in result.rows for value in row)
