"""Environments of this package for other frameworks: folders that their own loaders and clients take."""

from turnwise.ext.frameworks.export.core import FORMS, ExportedEnv, export_env, load_exported

__all__ = ["FORMS", "ExportedEnv", "export_env", "load_exported"]
