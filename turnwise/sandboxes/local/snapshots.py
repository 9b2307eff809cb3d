"""The files that local sandboxes begin from, and the snapshots of one backend."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.local.boot import file_copy


@dataclass(frozen=True, slots=True)
class Origin:
    """The initial files of a sandbox: an image's root file system (None: the host's programs) and a snapshot, if any.

    ``layers`` are the overlay's lower layers, uppermost first; empty for an empty workdir.
    """

    image: Path | None = None
    snapshot: Path | None = None
    layers: tuple[Path, ...] = ()

    @property
    def top(self) -> str:
        """Name of the folder that is the overlay's upper layer."""
        return "root" if self.image is not None else "work"


@dataclass(slots=True)
class _Snapshot:
    origin: Origin
    parent: str | None
    holders: set[str] = field(default_factory=set)
    dropped: bool = False


class Snapshots:
    """Snapshots by name, each removed once it is dropped and unreferenced."""

    def __init__(self) -> None:
        self._snapshots: dict[str, _Snapshot] = {}
        self._numbers = itertools.count(1)

    def new(self, state: Path) -> tuple[str, Path]:
        """Return a new name and its folder."""
        name = f"snapshot-{next(self._numbers)}"
        return name, state / "snapshots" / name

    def add(self, name: str, origin: Origin, parent: str | None) -> None:
        """Register a complete snapshot, which holds a reference to its parent."""
        self._snapshots[name] = _Snapshot(origin, parent)
        if parent is not None:
            self._snapshots[parent].holders.add(name)

    def hold(self, name: str, sandbox: str, holder: str | None = None) -> Origin:
        """Return a snapshot's origin and hold a reference until :meth:`release`. Raises SandboxUnavailable.

        Args:
            name: The snapshot.
            sandbox: The new holder.
            holder: A current holder; without one, a dropped snapshot cannot be used.
        """
        snapshot = self._snapshots.get(name)
        if snapshot is None or (snapshot.dropped and not snapshot.holders & {sandbox, holder}):
            raise SandboxUnavailable(f"snapshot {name!r} does not exist: it was dropped, or made by another process")
        snapshot.holders.add(sandbox)
        return snapshot.origin

    def release(self, holder: str, only: str | None = None) -> None:
        """Drop the references of a sandbox or snapshot, or its reference to ``only`` one snapshot."""
        for name, snapshot in list(self._snapshots.items()):
            if holder in snapshot.holders and only in (None, name):
                snapshot.holders.discard(holder)
                self._remove_unreferenced(name)

    def drop(self, name: str) -> None:
        """Remove a snapshot once it is unreferenced."""
        if name in self._snapshots:
            self._snapshots[name].dropped = True
            self._remove_unreferenced(name)

    def _remove_unreferenced(self, name: str) -> None:
        snapshot = self._snapshots[name]
        if snapshot.dropped and not snapshot.holders:
            del self._snapshots[name]
            if snapshot.origin.snapshot is not None:
                file_copy.remove_tree(str(snapshot.origin.snapshot))
            self.release(name)
