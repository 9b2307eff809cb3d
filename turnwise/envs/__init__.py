"""Environments at the level of messages, with Gymnasium's method names."""

from turnwise import export_lazily

__all__, __getattr__ = export_lazily(__name__, __file__)
