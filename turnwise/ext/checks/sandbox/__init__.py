"""Conformance checks and attacks for sandbox backends."""

from turnwise.ext.checks.sandbox.context import Outcome, SandboxReport
from turnwise.ext.checks.sandbox.core import check_sandbox

__all__ = ["Outcome", "SandboxReport", "check_sandbox"]
