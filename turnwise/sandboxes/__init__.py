"""Sandboxes for untrusted code: one contract, several backends."""

from turnwise.sandboxes.config import SandboxConfig, register_backend
from turnwise.sandboxes.core import (
    Capabilities,
    ExecResult,
    Mount,
    Sandbox,
    SandboxBackend,
    SandboxLimits,
    SandboxProcess,
    SandboxSpec,
)
from turnwise.sandboxes.manager import SandboxManager

__all__ = [
    "Capabilities",
    "ExecResult",
    "Mount",
    "Sandbox",
    "SandboxBackend",
    "SandboxConfig",
    "SandboxLimits",
    "SandboxManager",
    "SandboxProcess",
    "SandboxSpec",
    "register_backend",
]
