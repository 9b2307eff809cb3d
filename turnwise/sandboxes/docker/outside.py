"""The processes of a container, seen and ended from this machine, where its engine runs here and rights suffice.

Owns: :func:`belonging`, which tells those of one command, and :func:`end`. Refuses: when that is done (``ending.py``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from turnwise.sandboxes.docker.scripts import ID_VARIABLE

_DEAD: Final = {"Z", "X"}


@dataclass(frozen=True, slots=True)
class Seen:
    """One process.

    Attributes:
        parent: Its parent's number.
        started: When it started, in ticks since the boot.
        name: Which command its environment says that it belongs to.
        dead: Whether it has ended, and counts until its parent asks for it.
    """

    parent: int
    started: int
    name: str
    dead: bool = False


def look(first: int) -> dict[int, Seen]:
    """Return the processes of the namespace of a process, by number.

    Raises:
        OSError: They may not be looked at.
    """
    namespace = os.readlink(f"/proc/{first}/ns/pid")
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.readlink(f"/proc/{entry}/ns/pid") != namespace:
                continue
            fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
            environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # It has ended, or is another user's that has nothing to do with the container.
        own = f"{ID_VARIABLE}=".encode()
        name = next((each[len(own) :].decode(errors="replace") for each in environment if each.startswith(own)), "")
        found[int(entry)] = Seen(int(fields[1]), int(fields[19]), name, fields[0] in _DEAD)
    return found


def belonging(seen: Mapping[int, Seen], first: int, name: str, since: int, others: Collection[str]) -> set[int]:
    """Return the processes of one command: what descends from it, and what lost its parent and began after it.

    Args:
        seen: The processes of the container.
        first: Its first process.
        name: Names the command.
        since: Ticks since the boot, before which the command had not begun.
        others: Commands that ran at the same time: what lost its parent and says that it is of one of them is not of
            this one.
    """
    # What the engine starts for a command has the parent of the first process, which nothing inside can bring about.
    engine = seen[first].parent
    roots = [each for number, each in seen.items() if number != first and each.parent == engine]
    since = max([since, *(each.started for each in roots if each.name == name)])

    def belongs(number: int) -> bool:
        at = number
        while seen[at].parent in seen and seen[at].parent != first:
            at = seen[at].parent
        if seen[at].parent == first:
            return seen[at].started >= since and seen[at].name not in others
        return seen[at].name == name

    return {number for number in seen if number != first and not seen[number].dead and belongs(number)}


def end(first: int, name: str, since: int, others: Collection[str], seconds: float) -> bool:
    """End the processes of one command, and return whether none is left after so many seconds.

    All are stopped before the first is ended, so that what multiplies does not get ahead.
    """
    began = time.monotonic()
    stopped: set[int] = set()
    while time.monotonic() < began + seconds:
        try:
            seen = look(first)
            if first not in seen:
                return False
            found = belonging(seen, first, name, since, others)
            fresh = found - stopped
            _send(fresh or found, signal.SIGSTOP if fresh else signal.SIGKILL)
        except OSError:
            return False
        if not found and not _unasked(seen, first):
            return True
        stopped |= fresh
    return False


def _unasked(seen: Mapping[int, Seen], first: int) -> bool:
    """Whether processes that ended still count, since the first process has yet to ask for them."""
    return any(each.dead and each.parent == first for each in seen.values())


def _send(processes: Collection[int], number: signal.Signals) -> None:
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)
