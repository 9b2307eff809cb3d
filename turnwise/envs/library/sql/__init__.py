"""Questions over SQLite databases that are made in place: the answer is a query, and its result is compared."""

from turnwise.envs.library.sql.env import SqlEnv
from turnwise.envs.library.sql.tasks import tasks

__all__ = ["SqlEnv", "tasks"]
