"""Reward functions and rubrics.

Names are loaded lazily: a rubric imports neither an HTTP client nor a judge's dependencies.
"""

from turnwise import export_lazily

__all__, __getattr__ = export_lazily(__name__, __file__)
