"""Conformance checks and attacks for sandbox backends."""

from turnwise.ext.checks.sandbox.core import check_sandbox
from turnwise.ext.checks.sandbox.report import Outcome, SandboxReport

__all__ = ["Outcome", "SandboxReport", "check_sandbox"]
