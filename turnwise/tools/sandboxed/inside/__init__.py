"""Programs that tools run inside a sandbox, sent there as text. They import nothing but the standard library."""

from __future__ import annotations

from pathlib import Path


def source(name: str) -> str:
    """Return the text of one of these programs.

    Args:
        name: The file's name, without its ending.
    """
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
