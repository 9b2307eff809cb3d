"""SQL environment: questions over generated SQLite databases, answered by a query."""

from sql_env.env import SqlEnv
from sql_env.tasks import tasks

__all__ = ["SqlEnv", "tasks"]
