"""Repositories with issues, and hidden tests that say whether a patch resolves them."""

from turnwise.envs.swe.env import SweEnv
from turnwise.envs.swe.rows import Instance, row
from turnwise.envs.swe.tasks import tasks

__all__ = ["Instance", "SweEnv", "row", "tasks"]
