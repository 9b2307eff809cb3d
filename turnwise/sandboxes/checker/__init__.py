"""Conformance checks and attacks for sandbox backends."""

from turnwise.sandboxes.checker.context import Outcome, SandboxReport
from turnwise.sandboxes.checker.core import check_sandbox

__all__ = ["Outcome", "SandboxReport", "check_sandbox"]
