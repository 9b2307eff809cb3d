"""What the sides of the sandbox benchmark share: the commands, their sizes, and how times become figures."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass

COMMANDS = {"true": ("true", ""), "ls": ("ls /usr | head -n 1", "bin\n")}
"""What is run, and what it must write: nothing, and two programs with a pipe between them."""
BOXES = 32


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        starts: Sandboxes started one after the other.
        execs: Commands run one after the other in one sandbox.
        seconds: How long all boxes run commands at the same time.
    """

    starts: int
    execs: int
    seconds: float


def sizes() -> Sizes:
    """Return the sizes that the command line of a side asks for."""
    return Sizes(8, 60, 1.0) if "--quick" in sys.argv else Sizes(20, 200, 2.0)


def milliseconds(since: float) -> float:
    """Return how long ago a moment of ``time.perf_counter`` was."""
    return (time.perf_counter() - since) * 1000


def p50(times: list[float]) -> float:
    """Return the median."""
    return statistics.median(times)


def check(command: str, exit_code: int | None, output: str) -> None:
    """Refuse figures of commands that did not do what they should."""
    wanted = COMMANDS[command][1]
    if exit_code != 0 or output.replace("\r\n", "\n").strip() != wanted.strip():
        raise SystemExit(f"{COMMANDS[command][0]!r} ended with {exit_code} and wrote {output!r}, not {wanted!r}")
