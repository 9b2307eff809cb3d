"""Code environment: programming problems, graded by running tests in sandboxes."""

from turnwise.ext.environments.code.builtin import tasks
from turnwise.ext.environments.code.env import CodeEnv
from turnwise.ext.environments.code.formats import problem_of, row

__all__ = ["CodeEnv", "problem_of", "row", "tasks"]
