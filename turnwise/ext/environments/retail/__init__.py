"""Retail environment: customer service over a SQLite shop, scored by the final state."""

from turnwise.ext.environments.retail.env import RetailEnv
from turnwise.ext.environments.retail.tasks import tasks

__all__ = ["RetailEnv", "tasks"]
