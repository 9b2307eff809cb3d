"""The environment checker: plays an environment through its edge cases and reports contract violations."""

from turnwise.envs.checker.context import CheckReport, Finding
from turnwise.envs.checker.core import check_env

__all__ = ["CheckReport", "Finding", "check_env"]
