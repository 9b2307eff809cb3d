"""Programs that tools send into a sandbox as text; they use the standard library only."""

from __future__ import annotations

from pathlib import Path


def source(name: str) -> str:
    """Return the text of a program, by its file name without suffix."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
