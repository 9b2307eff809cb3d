"""SQL environment: questions over generated SQLite databases, answered by a query."""

from turnwise.envs.library.sql.env import SqlEnv
from turnwise.envs.library.sql.tasks import tasks

__all__ = ["SqlEnv", "tasks"]
