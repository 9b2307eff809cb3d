"""Programs that grading runs inside sandboxes, sent there as text. They import nothing but the standard library."""

from __future__ import annotations

from pathlib import Path

_MARK = "from turnwise.envs.library.code.inside.wire import "


def source(name: str) -> str:
    """Return the text of one of these programs, with that of the wire in the place of its import.

    Args:
        name: The file's name, without its ending.
    """
    folder = Path(__file__).parent
    lines = (folder / f"{name}.py").read_text(encoding="utf-8").splitlines()
    own = [line for line in lines if not line.startswith((_MARK, "from __future__"))]
    wire = (folder / "wire.py").read_text(encoding="utf-8")
    return "\n".join([wire, *own, ""])
