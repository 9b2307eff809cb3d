"""SWE environment: repositories with issues, and hidden tests that grade a patch."""

from turnwise.envs.library.swe.env import SweEnv
from turnwise.envs.library.swe.rows import Instance, row, tasks

__all__ = ["Instance", "SweEnv", "row", "tasks"]
