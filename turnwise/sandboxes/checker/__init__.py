"""The examination of sandboxes: does a backend keep the contract, and does it hold back what it says it holds back?"""

from turnwise.sandboxes.checker.core import check_sandbox
from turnwise.sandboxes.checker.report import Outcome, SandboxReport

__all__ = ["Outcome", "SandboxReport", "check_sandbox"]
