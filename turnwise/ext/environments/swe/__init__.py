"""SWE environment: repositories with issues, and hidden tests that grade a patch."""

from turnwise.ext.environments.swe.env import SweEnv
from turnwise.ext.environments.swe.rows import Instance, row, tasks

__all__ = ["Instance", "SweEnv", "row", "tasks"]
