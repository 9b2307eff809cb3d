"""A shop's customer service desk over SQLite: tools with state, a policy, and tasks whose goal is a state."""

from turnwise.envs.retail.env import RetailEnv
from turnwise.envs.retail.tasks import tasks

__all__ = ["RetailEnv", "tasks"]
