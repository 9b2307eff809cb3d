"""Search environment: multi-hop questions over a corpus, with BM25 search."""

from search_env.env import SearchEnv
from search_env.tasks import qa_tasks, tasks

__all__ = ["SearchEnv", "qa_tasks", "tasks"]
