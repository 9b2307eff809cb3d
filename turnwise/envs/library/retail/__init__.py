"""Retail environment: customer service over a SQLite shop, scored by the final state."""

from turnwise.envs.library.retail.env import RetailEnv
from turnwise.envs.library.retail.tasks import tasks

__all__ = ["RetailEnv", "tasks"]
