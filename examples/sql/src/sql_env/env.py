"""SqlEnv: tools to inspect a database, and a query as the answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Final, cast

from sql_env.database import MOST_STEPS, Database, Result
from sql_env.gold import Question, is_right, question_of, submitted_query
from sql_env.tasks import draw_task
from turnwise.envs.core import Env, ResetResult, Solution
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, ToolError, shown
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.types import Message, text_of, with_system

SYSTEM_PROMPT: Final = (
    "You answer questions about a SQLite database with a query. Look at the tables with the tools first. Then answer "
    "with one SELECT statement in a ```sql block and no tool call. Its columns are what the question asks for, in that "
    "order and nothing else. The query is run on this database and on another one with the same tables and other rows, "
    "so it must compute the answer."
)

_SAMPLE_ROWS: Final = 3
_LONGEST_CELL: Final = 120


class SqlEnv(ToolEnv):
    """Asks a question about a database; the answer is a query.

    The score is 1 if the query has the gold query's result, on this database and on a second one with other rows;
    else 0. Column names do not count, row order only where the gold query sorts.
    """

    blocking: ClassVar[bool] = True
    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "sql_env:tasks"
    fork_shares: ClassVar[Collection[str]] = ("question", "database", "_open_database")

    question: Question
    database: Database
    _open_database: Database | None = None

    def __init__(self, *, max_rows: int = 50, max_steps: int = MOST_STEPS) -> None:
        """Set limits.

        Args:
            max_rows: Rows of a result shown to the model.
            max_steps: SQLite instructions after which the model's query is stopped; large files may need more.
        """
        for name, value in (("max_rows", max_rows), ("max_steps", max_steps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {shown(value)}: it must be an integer of at least 1")
        self.max_rows, self.max_steps = max_rows, max_steps

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Open the database of the task; without a task, one is drawn from the seed."""
        self._close_database()
        task = draw_task(seed) if task is None else task
        self.question = question_of(task)
        self._open_database = self.database = self.question.open(steps=self.max_steps)
        return with_system(task.messages(), SYSTEM_PROMPT), {}

    @function_tool(inline=True)
    def list_tables(self) -> str:
        """The names of all tables."""
        return ", ".join(self.database.tables)

    @function_tool(inline=True)
    def describe_table(self, table: str) -> str:
        """The columns of a table, as its CREATE statement, and its first rows."""
        if table not in self.database.tables:
            raise ToolError(f"there is no table {shown(table)}: there are {', '.join(self.database.tables)}")
        name = table.replace('"', '""')
        sample = self.database.query(f'SELECT * FROM "{name}" LIMIT {_SAMPLE_ROWS}', most_rows=_SAMPLE_ROWS)
        return f"{self.database.tables[table]}\n\n{_table(sample)}"

    @function_tool(max_output=8_000)
    def query(self, sql: Annotated[str, "one SELECT statement"]) -> str:
        """The result of a query. The database is read-only, and long results are cut."""
        return _table(self.database.query(submitted_query(sql), most_rows=self.max_rows))

    def score(self, final: Message | None) -> float:
        """1 if the query in the message is right, else 0."""
        sql = "" if final is None else submitted_query(text_of(final))
        return float(bool(sql) and is_right(self.question, self.database, sql))

    def solve(self) -> Solution:
        """Inspect the tables, try the gold query and answer with it."""
        yield tool_call("list_tables")
        yield tool_call("query", sql=self.question.gold)
        yield f"```sql\n{self.question.gold}\n```"

    async def fork(self) -> Env:
        """Return a fork with a separate connection, since a connection answers one query at a time."""
        copy = cast("SqlEnv", await super().fork())
        copy._open_database = copy.database = copy.question.open(steps=copy.max_steps)
        return copy

    async def close(self) -> None:
        """Close the database."""
        await super().close()
        self._close_database()

    def _close_database(self) -> None:
        if self._open_database is not None:
            self._open_database.close()
            self._open_database = None


def _table(result: Result) -> str:
    lines = [" | ".join(result.columns), *(" | ".join(map(_cell, row)) for row in result.rows)]
    if result.more:
        lines.append(f"(further rows are not shown; the first {len(result.rows)} are)")
    elif not result.rows:
        lines.append("(no rows)")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    text = f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
    text = " ".join(text.split("\n"))
    return text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]}..."
