"""Environments of other frameworks: reasoning-gym, gem, TextArena, OpenEnv, verifiers."""

from turnwise.envs.foreign.core import ForeignEnv, register_framework
from turnwise.envs.foreign.tasks import tasks

__all__ = ["ForeignEnv", "register_framework", "tasks"]
