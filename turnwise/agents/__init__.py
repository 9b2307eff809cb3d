"""Agents: the code that acts in an episode."""

from turnwise import export_lazily

__all__, __getattr__ = export_lazily(__name__, __file__)
