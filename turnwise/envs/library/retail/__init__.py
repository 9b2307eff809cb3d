"""A shop's customer service desk over SQLite: tools with state, a policy, and tasks whose goal is a state."""

from turnwise.envs.library.retail.env import RetailEnv
from turnwise.envs.library.retail.tasks import tasks

__all__ = ["RetailEnv", "tasks"]
