"""Evaluation: an environment's tasks against a model, and the resulting metrics."""

from turnwise import export_lazily

__all__, __getattr__ = export_lazily(__name__, __file__)
