"""What a function's docstring says of it and of its parameters.

Owns: :func:`read_docstring`, for Google's style. Refuses: complaining; a docstring in another style is a description.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final

_SECTION: Final = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|References|"
    r"Todo|Warnings?):\s*"
)
_ENTRY: Final = re.compile(r"(?P<name>\w+)\s*(\([^)]*\))?\s*:\s*(?P<text>.*)")


def read_docstring(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of a docstring, and the texts of its ``Args`` section where there is one."""
    lines = inspect.cleandoc(fn.__doc__ or "").splitlines()
    start = next((n for n, line in enumerate(lines) if _SECTION.fullmatch(line)), len(lines))
    texts: dict[str, str] = {}
    section, indent, current = "", None, None
    for line in lines[start:]:
        header = _SECTION.fullmatch(line)
        if header:
            section, indent, current = header[1], None, None
            continue
        if section not in ("Args", "Arguments", "Parameters", "Params") or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        entry = _ENTRY.fullmatch(line.strip())
        if depth == indent and entry:
            current = entry["name"]
            texts[current] = entry["text"].strip()
        elif current is not None:
            texts[current] = f"{texts[current]} {line.strip()}".strip()
    return "\n".join(lines[:start]).strip(), texts
