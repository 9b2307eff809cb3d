"""Environments of other frameworks: reasoning-gym, gem, TextArena, OpenEnv, verifiers."""

from turnwise.ext.frameworks.foreign.core import ForeignEnv, register_framework, tasks

__all__ = ["ForeignEnv", "register_framework", "tasks"]
