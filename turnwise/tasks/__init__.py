"""Tasks: dataset rows from files, hubs and functions, and the order in which they are taken."""

from turnwise import export_lazily

__all__, __getattr__ = export_lazily(__name__, __file__)
