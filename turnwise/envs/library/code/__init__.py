"""Code environment: programming problems, graded by running tests in sandboxes."""

from turnwise.envs.library.code.env import CodeEnv
from turnwise.envs.library.code.formats import problem_of, row
from turnwise.envs.library.code.made import tasks

__all__ = ["CodeEnv", "problem_of", "row", "tasks"]
