"""Kills at events of a run, drawn at random: when the n-th line of a kind is in one of its files, or half of it.

:func:`watch` is called in the process of the run before it begins. It takes the kill that is due from ``kill.json``,
and notes in ``struck.jsonl`` who was killed and what ran below it. The process stands still while another one dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from support.crash.moments import ended
from turnwise import append_file, trajectory_file

CHECKPOINT = "checkpoints"
"""In place of a file: a file of a checkpoint that is being written."""
# What a line begins with, and how many of the kind a step of two groups of four members has at least.
EVENTS: dict[str, tuple[str, str, int]] = {
    "call": ("ledger.jsonl", "{", 8),
    "trajectory": ("trajectories.twz", "", 6),
    "member": ("journal.jsonl", '{"event":"member"', 6),
    "group": ("journal.jsonl", '{"event":"group"', 2),
    "batch taken": ("journal.jsonl", '{"event":"take"', 1),
    "rows, before their update": ("batches.jsonl", '{"step"', 1),
    "update": ("timeline.jsonl", '["update"', 1),
    "weights on the servers": ("timeline.jsonl", '["sync"', 1),
    "step, before its checkpoint": ("metrics.jsonl", '{"kind":"train"', 1),
    "file of a checkpoint": (CHECKPOINT, "", 5),
    "checkpoint": ("timeline.jsonl", '["checkpoint"', 1),
}
KILL, STRUCK = "kill.json", "struck.jsonl"


@dataclass(frozen=True)
class Kill:
    """A kill that is due.

    Attributes:
        event: A key of :data:`EVENTS`.
        number: Of such events from now on, from 1.
        half: Whether the line is written by half.
        victim: The process that is killed; None is the run's.
    """

    event: str
    number: int
    half: bool = False
    victim: int | None = None

    @classmethod
    def draw(cls, draw: random.Random, victim: int | None = None, *, seen_outside: bool = False) -> Kill:
        """Draw an event, and which of its kind; ``seen_outside``, one that another process can :meth:`count`."""
        event = draw.choice([name for name, (file, *_) in EVENTS.items() if file != CHECKPOINT or not seen_outside])
        return cls(event, draw.randint(1, EVENTS[event][2]), draw.random() < 0.3, victim)

    def order(self, folder: Path) -> None:
        """Make it the one that is due."""
        draft = folder / f".{KILL}"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(folder / KILL)

    def count(self, run: Path) -> int:
        """Return how many lines of its kind a run has, as another process sees it."""
        name, line, _ = EVENTS[self.event]
        files = [run / name, *(run / "ledgers").glob("*")] if self.event == "call" else [run / name]
        lines = [line_ for file in files if file.is_file() for line_ in file.read_bytes().split(b"\n")]
        return sum(line_.startswith(line.encode()) for line_ in lines)


def watch(folder: Path) -> None:
    """Kill what ``kill.json`` of a folder says when its event comes in this process."""
    watcher = _Watcher(folder)
    append_file.append_whole = trajectory_file.append_whole = watcher.appending(append_file.append_whole)
    os.fsync = watcher.syncing(os.fsync)


class _Watcher:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._order: bytes | None = None
        self._count = 0
        self._lock = threading.Lock()

    def appending(self, append: Callable[[int, bytes], None]) -> Callable[[int, bytes], None]:
        """Return what appends lines as ``append`` does, and strikes when they are written."""

        def append_and_strike(file: int, data: bytes) -> None:
            kill = self._due(_name(file), data)
            if kill is not None and kill.half:
                half = len(data) // 2
                os.write(file, data[:half])
                self._strike(kill)
                data = data[half:]
            append(file, data)
            if kill is not None and not kill.half:
                self._strike(kill)

        return append_and_strike

    def syncing(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        """Return what syncs as ``sync`` does, and strikes before it."""

        def strike_and_sync(file: int) -> None:
            if ".draft-step_" in os.readlink(f"/proc/self/fd/{file}") and (kill := self._due(CHECKPOINT, b"")):
                self._strike(kill)
            sync(file)

        return strike_and_sync

    def _due(self, name: str, data: bytes) -> Kill | None:
        """Count an event, and return the kill whose event it is."""
        with self._lock:
            try:
                order = (self._folder / KILL).read_bytes()
            except FileNotFoundError:
                return None
            if order != self._order:
                self._order, self._count = order, 0
            kill = Kill(**json.loads(order))
            file, line, _ = EVENTS[kill.event]
            if name != file or not data.startswith(line.encode()):
                return None
            self._count += 1
            if self._count < kill.number:
                return None
            # The next order may be equal: its victim may not have ended yet.
            self._order = None
            return kill

    def _strike(self, kill: Kill) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim = psutil.Process(kill.victim)
            below = [(process.pid, process.create_time()) for process in victim.children(recursive=True)]
            with (self._folder / STRUCK).open("a") as file:
                file.write(json.dumps({**asdict(kill), "below": below}) + "\n")
            (self._folder / KILL).unlink()
            with ended(victim):
                victim.kill()
        (self._folder / KILL).unlink(missing_ok=True)


def _name(file: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{file}")).name


def struck(folder: Path) -> list[dict[str, Any]]:
    """Return the kills that were carried out."""
    file = folder / STRUCK
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ran_below(kill: dict[str, Any]) -> Iterator[psutil.Process]:
    """Yield what ran below the victim of a kill, and may still run."""
    for pid, created in kill["below"]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                yield process
