"""The contract of a placement: it starts the processes of a run, here or on the nodes of a cluster."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeAlias

from turnwise.model.core import MemoryUse

Role: TypeAlias = Literal["replica", "rank"]
"""What a process is in a run, by which its resources are chosen."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a process gets from its parent.

    Attributes:
        report: Descriptor for one line, once the process is ready.
        lifeline: Descriptor whose end of file ends the process.
        host: Address of its node; None on this machine.
    """

    report: int
    lifeline: int
    host: str | None = None


Command: TypeAlias = Callable[[Inherited], Sequence[str]]
"""Returns the command line of a process that uses what it inherits."""
Environment: TypeAlias = Callable[[Mapping[str, str]], Mapping[str, str]]
"""From the environment variables of its parent to those of the process."""


@dataclass(frozen=True, slots=True)
class Program:
    """A process to start.

    Attributes:
        what: What it is, for messages.
        role: What it is in the run.
        command: Its command line; sent to another node by value.
        environment: Its environment variables; sent to another node by value.
        log_file: Where its output goes; on a cluster in a directory that all nodes share.
    """

    what: str
    role: Role
    command: Command
    environment: Environment
    log_file: Path


class PlacedProcess(ABC):
    """A started process.

    Attributes:
        pid: Its id on its machine, where it leads a process group.
        host: Address of its node; None on this machine.
        ended: Set once it has ended.
        status: Exit code, or the negative number of a signal; valid once it has ended.
        lost: Why its end was not observed, such as the loss of its node; empty otherwise.
        cpu_seconds: Valid once it has ended.
    """

    pid: int
    host: str | None
    ended: asyncio.Event
    status: int = 0
    lost: str = ""
    cpu_seconds: float = 0.0

    @abstractmethod
    async def report(self) -> bytes | None:
        """Return the line that it reports when it is ready, or None if it ended without one. Called once."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""

    async def deliver(self, file: Path) -> Path:
        """Make a file of this machine readable by the process; return its path there. Raises PlacementError.

        What was delivered before the last call may be removed.
        """
        return file

    @abstractmethod
    async def running_cpu(self) -> float:
        """Return the CPU seconds of its running process group."""

    @abstractmethod
    async def memory(self) -> MemoryUse | None:
        """Return its memory and that of its descendants, without GPUs; None if that is unknown."""

    @abstractmethod
    def release(self) -> None:
        """End what is left of it, and free what it held. Idempotent."""


RANK_TOKEN = "TURNWISE_RANK_TOKEN"
"""Environment variable with what a rank sends first on its connection."""
RankCommand: TypeAlias = Callable[[str, Inherited], Sequence[str]]
"""Returns the command line of a rank, given where this process waits for its connection (HOST:PORT)."""
StartedRank: TypeAlias = tuple[Any, Callable[[], Connection], Path]
"""A rank's process, as a ``subprocess.Popen``; what waits for its connection; and the file of its output."""


class RankHosts(ABC):
    """Starts the ranks of a sharded learner on other nodes.

    Attributes:
        host: Address of this process's node, where they meet.
    """

    host: str

    @abstractmethod
    def launch(self, rank: int, command: RankCommand, threads: int, timeout: float) -> StartedRank:
        """Start a rank, which has ``timeout`` seconds to start and to connect; accepting it raises PlacementError.

        Raises:
            OSError: Its node refused to start it.
            PlacementError: No node took it in time.
        """


class Placement(ABC):
    """Starts the processes of a run.

    Attributes:
        ranks: Starts ranks on other nodes; None where they run on this machine.
    """

    ranks: RankHosts | None = None

    @abstractmethod
    async def start(self, program: Program) -> PlacedProcess:
        """Start a process.

        Raises:
            OSError: The system refused to start it.
            PlacementError: No node can take it, or its node was lost.
        """
