"""The environment checker: plays an environment through its edge cases and reports contract violations."""

from turnwise.ext.checks.environment.context import CheckReport, Finding
from turnwise.ext.checks.environment.core import check_env

__all__ = ["CheckReport", "Finding", "check_env"]
