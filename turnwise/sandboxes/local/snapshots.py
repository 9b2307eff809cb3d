"""What sandboxes left to begin others from.

Owns: the names of snapshots, who stands on them, and when their folders go: a layer below a living overlay must stay.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.local.boot import removal
from turnwise.sandboxes.local.plans import Origin


@dataclass(slots=True)
class _Kept:
    origin: Origin
    parent: str | None
    users: set[str] = field(default_factory=set)
    dropped: bool = False


class Snapshots:
    """The snapshots of one backend."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._numbers = itertools.count(1)

    def new(self, state: Path) -> tuple[str, Path]:
        """Return a name, and the folder that its files come into."""
        name = f"snapshot-{next(self._numbers)}"
        return name, state / "snapshots" / name

    def add(self, name: str, origin: Origin, parent: str | None) -> None:
        """Take note of a snapshot whose files are kept; it stands on its parent."""
        self._kept[name] = _Kept(origin, parent)
        if parent is not None:
            self._kept[parent].users.add(name)

    def use(self, name: str, sandbox: str) -> Origin:
        """Return what a sandbox begins from that stands on a snapshot until it is released.

        Raises:
            SandboxUnavailable: There is no such snapshot.
        """
        kept = self._kept.get(name)
        if kept is None or (kept.dropped and sandbox not in kept.users):
            raise SandboxUnavailable(f"snapshot {name!r} is not there: it was dropped, or made by another process")
        kept.users.add(sandbox)
        return kept.origin

    def release(self, user: str) -> None:
        """Take note that a sandbox, or a snapshot, stands on nothing any longer."""
        for name, kept in list(self._kept.items()):
            if user in kept.users:
                kept.users.discard(user)
                self._remove(name)

    def drop(self, name: str) -> None:
        """Let a snapshot go as soon as nothing stands on it."""
        if name in self._kept:
            self._kept[name].dropped = True
            self._remove(name)

    def _remove(self, name: str) -> None:
        kept = self._kept[name]
        if kept.dropped and not kept.users:
            del self._kept[name]
            if kept.origin.snapshot is not None:
                removal.remove(str(kept.origin.snapshot))
            self.release(name)
