"""Processes on the nodes of a Ray cluster: an actor on the node starts one, and tells how it ends.

The process ends with its actor (lifeline pipe), and the actor with its node or with the program that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address

from turnwise.model.core import MemoryUse
from turnwise.placement.core import PlacedProcess, Placement, Program, RankHosts
from turnwise.placement.file_delta import FilePart, FileVersion, changed_parts, whole_file
from turnwise.placement.local import LocalPlacement, LocalProcess, remove_orphans
from turnwise.placement.ray_cluster import RayCluster, Slot, lost_actor

_AGAIN = 0.5
"""Seconds before an actor is tried again whose node has just been lost."""
_SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_PREFIX = "turnwise-weights-"


class ProcessHost:
    """The actor of one process."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None
        self._files: Path | None = None

    async def start(self, program: Program) -> tuple[int, str]:
        """Start the process; return its id and the address of the node. Raises OSError."""
        host = get_node_ip_address()
        self._process = await LocalPlacement(host).start(program)
        return self._process.pid, host

    async def report(self) -> bytes | None:
        """Return the line that the process reports."""
        return await self._running_process.report()

    async def wait(self) -> tuple[int, float]:
        """Wait for the end of the process; return its status and its CPU seconds."""
        await self._running_process.ended.wait()
        return self._running_process.status, self._running_process.cpu_seconds

    async def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._running_process.signal(number)

    async def machine(self) -> str:
        """Return what tells this machine from others, for as long as it runs."""
        return machine_id()

    async def begin(self, name: str, older: str | None) -> str | None:
        """Make a file in shared memory of this machine, empty or a copy of an older one; return its path.

        All others but the last one, which is read, are removed. None: the older one is not here.
        """
        if self._files is None:
            remove_orphans(_SHARED, _PREFIX)
            self._files = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_SHARED))
        path, last = self._files / name, None if older is None else self._files / older
        if last is not None and not last.is_file():
            return None
        if last == path:
            return str(path)
        for outdated in sorted(self._files.iterdir(), key=lambda file: file.stat().st_mtime_ns)[:-1]:
            if outdated != last:
                outdated.unlink()
        # A server that maps a file of this name keeps its pages.
        path.unlink(missing_ok=True)
        if last is None:
            path.touch()
        else:
            await asyncio.to_thread(shutil.copyfile, last, path)
        return str(path)

    async def receive(self, path: str, start: int, distances: bytes, content: bytes) -> None:
        """Write a part into a file that was begun; see :class:`FilePart`."""
        await asyncio.to_thread(FilePart(start, distances, content).write, Path(path))

    async def running_cpu(self) -> float:
        """Return the CPU seconds of its process group."""
        return await self._running_process.running_cpu()

    async def memory(self) -> MemoryUse | None:
        """Return the memory of it and its descendants."""
        return await self._running_process.memory()

    @property
    def _running_process(self) -> LocalProcess:
        assert self._process is not None, "start() was not called"
        return self._process


class RayProcess(PlacedProcess):
    """A process on a node, behind its actor.

    Attributes:
        there: What tells its machine from others; None until it was asked.
        delivered_bytes: Bytes of files sent to it so far.
    """

    delivered_bytes = 0

    def __init__(self, actor: Any, started: tuple[int, str], release: Callable[[], None]) -> None:
        self.pid, self.host = started
        self.ended = asyncio.Event()
        self._actor = actor
        self._release = release
        self.there: str | None = None
        # The last one of each folder.
        self._delivered: dict[Path, FileVersion] = {}
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        try:
            self.status, self.cpu_seconds = await patiently(self._actor.wait.remote)
        except RayError as error:
            self.status, self.lost = (
                -signal.SIGKILL,
                f"its node or its actor was lost ({' '.join(str(error).split())[:300]})",
            )
        finally:
            self.ended.set()

    async def report(self) -> bytes | None:
        """Return the line that it reports; None if it ended without one, or its node was lost."""
        try:
            line: bytes | None = await patiently(self._actor.report.remote)
        except RayError:
            await self.ended.wait()
            return None
        if line is None:
            await self.ended.wait()
        return line

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.ended.is_set():
            self._actor.signal.remote(int(number))

    async def deliver(self, file: Path) -> Path:
        """Send a file to the process's machine, unless that is this one: what changed since the last of its folder.

        It is sent whole where the last one is missing here or there, or has another size. Raises PlacementError.
        """
        try:
            if self.there is None:
                self.there = str(await self._actor.machine.remote())
            if self.there == machine_id():
                return file
            # Versions of several policies have the same names, each in its own folder here.
            name, folder = f"{file.parent.name}-{file.name}", file.parent
            parts, path = whole_file(file), None
            last = self._delivered.pop(folder, None)
            if last is not None and last.precedes(file):
                path = await self._actor.begin.remote(name, f"{file.parent.name}-{last.path.name}")
                parts = parts if path is None else changed_parts(last.path, file)
            path = path or await self._actor.begin.remote(name, None)
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                self.delivered_bytes += part.nbytes
                await self._actor.receive.remote(path, part.start, part.distances, part.content)
        except RayError as error:
            raise lost_actor(f"the host of process {self.pid}", error) from error
        self._delivered[folder] = FileVersion.of(file)
        return Path(str(path))

    async def running_cpu(self) -> float:
        """Return the CPU seconds of its process group; 0 if its node was lost."""
        try:
            return float(await self._actor.running_cpu.remote())
        except RayError:
            return 0.0

    async def memory(self) -> MemoryUse | None:
        """Return its memory and that of its descendants; None if its node was lost."""
        try:
            use: MemoryUse | None = await self._actor.memory.remote()
        except RayError:
            return None
        return use

    def release(self) -> None:
        """End the actor, and release its resources. Idempotent."""
        self._watching.cancel()
        self.ended.set()
        self._release()


class RayPlacement(Placement):
    """Places processes in the placement group of a run.

    Args:
        cluster: Where they start.
        ranks: Starts ranks there.
    """

    def __init__(self, cluster: RayCluster, ranks: RankHosts) -> None:
        self.ranks = ranks
        self._cluster = cluster

    async def start(self, program: Program) -> RayProcess:
        """Start a process on its node; wait for another one while a lost node is replaced.

        Raises:
            OSError: The node's system refused to start it.
        """
        slot = self._cluster.claim(program.role)
        while True:
            actor = self._cluster.actor(ProcessHost, slot, program.what)
            try:
                started = await actor.start.remote(program)
            except RayActorError:
                # Ray may place it on a node that has died, until it has noticed.
                kill(actor)
                await asyncio.sleep(_AGAIN)
            except BaseException:  # a refusal of the system, or a cancellation: the slot is free again
                self._release(actor, slot)
                raise
            else:
                return RayProcess(actor, started, partial(self._release, actor, slot))

    def _release(self, actor: Any, slot: Slot) -> None:
        kill(actor)
        self._cluster.release(slot)


class RayObject:
    """An object in its own actor, such as a rollout worker.

    Attributes:
        name: For messages.
    """

    def __init__(self, cluster: RayCluster, slot: Slot, actor: Any, name: str, patience: float) -> None:
        self.name = name
        self._cluster = cluster
        self._slot: Slot | None = slot
        self._actor = actor
        self._patience = patience

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method.

        Raises:
            PlacementError: The actor or its node was lost.
            Exception: What the method raises.
        """
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None if isinstance(error.cause, Exception) else error
        except RayError as error:
            raise lost_actor(self.name, error) from error

    async def close(self) -> None:
        """Close the object within its patience, and end its actor. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        try:
            with contextlib.suppress(TimeoutError, Exception):
                await asyncio.wait_for(self.call("close"), self._patience)
        finally:
            kill(self._actor)
            self._cluster.release(slot)


async def patiently(call: Callable[[], Any]) -> Any:
    """Await a call that may be repeated, also while Ray cannot say whether its actor is lost. Raises RayError."""
    while True:
        try:
            return await call()
        except ActorUnavailableError:
            await asyncio.sleep(_AGAIN)


def machine_id() -> str:
    """Return what tells this machine from others, for as long as it runs."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def kill(actor: Any) -> None:
    """End an actor and, with it, its process."""
    with contextlib.suppress(RayError, RuntimeError):
        ray.kill(actor, no_restart=True)
