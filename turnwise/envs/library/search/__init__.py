"""Questions whose answer stands in several passages of a corpus, found with BM25."""

from turnwise.envs.library.search.env import SearchEnv
from turnwise.envs.library.search.tasks import qa_tasks, tasks

__all__ = ["SearchEnv", "qa_tasks", "tasks"]
