"""SQL environment: questions over generated SQLite databases, answered by a query."""

from turnwise.ext.environments.sql.env import SqlEnv
from turnwise.ext.environments.sql.tasks import tasks

__all__ = ["SqlEnv", "tasks"]
