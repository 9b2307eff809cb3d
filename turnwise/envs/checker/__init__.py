"""The environment doctor: plays an environment in every way that goes wrong elsewhere, and says what to mend."""

from turnwise.envs.checker.context import CheckReport, Finding
from turnwise.envs.checker.core import check_env

__all__ = ["CheckReport", "Finding", "check_env"]
