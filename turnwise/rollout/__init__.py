"""Rollouts: from tasks to groups of trajectories."""

from turnwise import export_lazily

__all__, __getattr__ = export_lazily(__name__, __file__)
