"""Grading programs, sent into sandboxes as text; standard library only."""

from __future__ import annotations

from pathlib import Path

_MARK = "from turnwise.ext.environments.code.inside.wire import "


def source(name: str) -> str:
    """Return the text of a program, with the wire module inlined.

    Args:
        name: File name without suffix.
    """
    folder = Path(__file__).parent
    lines = (folder / f"{name}.py").read_text(encoding="utf-8").splitlines()
    program = [line for line in lines if not line.startswith((_MARK, "from __future__"))]
    wire = (folder / "wire.py").read_text(encoding="utf-8")
    return "\n".join([wire, *program, ""])
