"""Tools: functions, methods and objects that a model may call."""

from turnwise import export_lazily

__all__, __getattr__ = export_lazily(__name__, __file__)
