"""The command line: ``turnwise train | sft | eval | serve | view | audit | check-env | version``."""

from turnwise.cli.app import app, main

__all__ = ["app", "main"]
