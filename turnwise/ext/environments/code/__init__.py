"""Code environment: programming problems, graded by running tests in sandboxes."""

from turnwise.ext.environments.code.env import CodeEnv
from turnwise.ext.environments.code.formats import problem_of, row
from turnwise.ext.environments.code.made import tasks

__all__ = ["CodeEnv", "problem_of", "row", "tasks"]
