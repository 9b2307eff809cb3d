"""Repositories with issues, and hidden tests that say whether a patch resolves them."""

from turnwise.envs.library.swe.env import SweEnv
from turnwise.envs.library.swe.rows import Instance, row, tasks

__all__ = ["Instance", "SweEnv", "row", "tasks"]
