"""Sandboxes for untrusted code: one contract, several backends."""

from turnwise import export_lazily

__all__, __getattr__ = export_lazily(__name__, __file__)
