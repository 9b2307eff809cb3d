"""Programs for other frameworks, and what is changed in them to run here: lines that import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PROGRAMS = Path(__file__).parent
DOORS = "turnwise.ext.frameworks.compat"


def with_other_imports(name: str, lines: Mapping[str, str], folder: Path) -> Path:
    """Write a program with other import lines to a folder, and return the file; all other lines are unchanged."""
    program = (PROGRAMS / name).read_text("utf-8")
    for line, other in lines.items():
        assert line.startswith(("import ", "from "))
        assert other.startswith(("import ", "from "))
        assert [text.strip() for text in program.splitlines()].count(line) == 1
        program = program.replace(f"{line}\n", f"{other}\n")
    file = folder / name
    file.write_text(program)
    return file
