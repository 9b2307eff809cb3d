"""The examination of sandboxes: does a backend keep the contract, and does it hold back what it says it holds back?"""

from turnwise.sandboxes.checker.context import Outcome, SandboxReport
from turnwise.sandboxes.checker.core import check_sandbox

__all__ = ["Outcome", "SandboxReport", "check_sandbox"]
