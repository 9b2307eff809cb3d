"""Environments of other frameworks: verifiers, and what packages register."""

from turnwise.ext.frameworks.foreign.core import ForeignEnv, Framework, register_framework, tasks

__all__ = ["ForeignEnv", "Framework", "register_framework", "tasks"]
