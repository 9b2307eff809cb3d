"""Task generators that configurations name, as ``support.envs.task_rows:function``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# With which ``start`` the functions were called.
CALLS: list[int] = []


def endless(width: int = 3) -> Iterator[dict[str, Any]]:
    """Yield rows without an end."""
    number = 0
    while True:
        yield {"prompt": "x" * width, "number": number}
        number += 1


def finite(n: int, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rows from ``start`` on, of ``n`` in all."""
    CALLS.append(start)
    for number in range(start, n):
        yield {"id": f"f{number}", "prompt": str(number)}


def refuses(n: int, broken_row: int) -> Iterator[dict[str, Any]]:
    """Yield rows of which one has no prompt."""
    for number in range(n):
        yield {"id": str(number), "prompt": None if number == broken_row else "p"}
