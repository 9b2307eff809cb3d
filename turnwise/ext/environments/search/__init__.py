"""Search environment: multi-hop questions over a corpus, with BM25 search."""

from turnwise.ext.environments.search.env import SearchEnv
from turnwise.ext.environments.search.tasks import qa_tasks, tasks

__all__ = ["SearchEnv", "qa_tasks", "tasks"]
