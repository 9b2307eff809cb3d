"""The environment doctor: plays an environment in every way that goes wrong elsewhere, and says what to mend."""

from turnwise.envs.doctor.core import check_env
from turnwise.envs.doctor.report import CheckReport, Finding

__all__ = ["CheckReport", "Finding", "check_env"]
