"""The sandbox contract: specs, limits, capabilities, commands, files, snapshots and backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, NoReturn, Self, TypeAlias

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.forwarding import PortForwarding

MAX_OUTPUT: Final = 65_536
"""Bytes kept of each of a command's two streams: half from its beginning, half from its end."""
MAX_FILE: Final = 64 * 2**20
"""Default limit in bytes of a file that is read, or of all files of a download together."""
WORKDIR: Final = "/work"
"""Default working directory of commands inside a sandbox; relative paths start there."""

Command: TypeAlias = str | Sequence[str]
"""A text is run by ``bash -c`` (``sh -c`` without bash), a sequence is a program and its arguments."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command. Timeouts and failures are results, never exceptions.

    Attributes:
        exit_code: As a shell reports it: 127 for a missing program, 128 + n after signal n, 124 after a timeout.
        stdout: Standard output; above ``max_output`` bytes its head and tail, with a line between them that counts the
            missing bytes.
        stderr: Standard error, likewise.
        timed_out: Whether the command and all its processes were killed by the timeout.
        truncated: Whether one of the streams is cut.
        duration: Seconds from the request to the end of the command.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    duration: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0, without a timeout."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """Both streams as text, stdout first; invalid UTF-8 is replaced."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of the whole sandbox, except where noted.

    Attributes:
        memory: Bytes of memory of all processes together.
        pids: Concurrent processes and threads.
        cpus: Processor time per second, in processors; None: as many as the machine has.
        cpu_seconds: Processor seconds of a single process; None: unlimited.
        disk: Bytes that may be written to its file systems.
        file_size: Bytes of a single file.
        open_files: Open files of a single process.
        network: Whether the network is accessible. Without, only exposed addresses are.
    """

    memory: int = 2 * 2**30
    pids: int = 256
    cpus: float | None = None
    cpu_seconds: float | None = None
    disk: int = 2 * 2**30
    file_size: int = 512 * 2**20
    open_files: int = 4096
    network: bool = False


@dataclass(frozen=True, slots=True)
class Mount:
    """A read-only mount of the host path ``source`` at the absolute path ``target`` inside."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The specification of a sandbox; serialisable.

    Attributes:
        image: Name of the root file system (a container image, or a rootfs folder for ``local``); None is the backend's
            default.
        workspace: A host folder copied to the workdir at the start; it is never modified.
        snapshot: A snapshot to start from (:meth:`Sandbox.snapshot`) instead of image and workspace.
        workdir: Working directory of commands; created if missing.
        env: Environment variables of every command. The host's environment is not inherited.
        mounts: Read-only mounts.
        user: User of commands, for backends with several; None: an unprivileged one.
        limits: Resource limits.
        labels: Labels of its containers and processes, for inspection.
    """

    image: str | None = None
    workspace: Path | None = None
    snapshot: str | None = None
    workdir: str = WORKDIR
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    user: str | None = None
    limits: SandboxLimits = SandboxLimits()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The isolation and features of a sandbox on this machine, as probed.

    Attributes:
        isolation: ``bubblewrap``, ``landlock``, ``plain``, ``docker``, ``docker/runsc`` or ``e2b``.
        filesystem: Whether host files outside the sandbox are inaccessible, for reading and writing.
        processes: Whether host processes cannot be seen, signalled or traced.
        network: Whether the network, the host's loopback and abstract sockets are inaccessible (limits.network False).
        memory: Whether ``limits.memory`` holds for all processes together (not each on its own).
        pids: Whether ``limits.pids`` holds.
        disk: Whether ``limits.disk`` holds.
        kernel: Whether settings under ``/proc/sys``, keyrings, mounts, device nodes and new namespaces are
            inaccessible.
        siblings: Whether one sandbox cannot use up for others what the kernel counts by user: pipes, inotify instances,
            descriptors in flight.
        survives_host: Whether it outlives a killed host process, until it is reaped.
        snapshots: Whether :meth:`Sandbox.snapshot` and :meth:`Sandbox.fork` work.
        fork_processes: Whether the processes of a sandbox continue in its forks; else forks start without any.
        expose: Whether ``listen`` and ``expose`` of a sandbox work.
        images: Whether ``spec.image`` is supported.
        notes: Gaps of the isolation and their causes.
    """

    isolation: str
    filesystem: bool = True
    processes: bool = True
    network: bool = True
    memory: bool = True
    pids: bool = True
    disk: bool = True
    kernel: bool = True
    siblings: bool = True
    survives_host: bool = False
    snapshots: bool = True
    fork_processes: bool = False
    expose: bool = True
    images: bool = True
    notes: tuple[str, ...] = ()


class SandboxProcess(ABC):
    """A running command with interactive input and output; its two output streams are merged in order."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse a copy (a fork of an environment makes one): a fork of a sandbox has its files, but no process.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a process of a sandbox cannot be copied: leave it out of the copy of its owner (__deepcopy__), and start "
            "another when it is needed"
        )

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to its input. Raises BrokenPipeError."""

    @abstractmethod
    async def read(self, max_bytes: int = MAX_OUTPUT) -> bytes:
        """Return output as soon as there is any; empty at the end."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """Close its input; idempotent."""

    @abstractmethod
    async def interrupt(self) -> None:
        """Send SIGINT to the command's process group, as Ctrl-C does; a no-op after its end."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill it with all its processes; a no-op after its end."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for its end and return its exit code, as a shell reports it."""


class Sandbox(PortForwarding, ABC):
    """An isolated environment for commands: started once, closed once, with any number of concurrent commands.

    An async context manager that starts and closes it. All paths are resolved inside: none leads out by links or
    ``..``. Once it has ended, every method except ``close`` raises SandboxDied.

    Attributes:
        backend: Registered name of its backend.
        spec: The requested spec.
        id: Unique on this machine.
        capabilities: Known once it has started.
        start_slots: Entered while one of its forks starts, and inherited by them; a manager bounds with it how many
            sandboxes start at the same time.
    """

    backend: ClassVar[str]
    spec: SandboxSpec
    id: str
    capabilities: Capabilities
    start_slots: AbstractAsyncContextManager[object] = nullcontext()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def start(self) -> None:
        """Start it. A failed or cancelled start leaves nothing behind.

        Raises:
            SandboxUnavailable: The spec is impossible on this machine.
            SandboxStartError: It did not start; retrying may help.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill everything inside and free its resources; idempotent, also before a start."""

    @abstractmethod
    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """Run a command to its end.

        It ends with its program: background processes survive, and their later output is dropped. Cancellation kills it
        like a timeout.

        Args:
            command: The command.
            timeout: Seconds after which it is killed with all its processes, however detached; the sandbox and other
                commands' processes survive. None: unlimited.
            cwd: Working directory, absolute or relative to the workdir; SandboxFileNotFound if it is not a folder.
            env: Variables besides those of the spec.
            stdin: Its input, empty by default.
            max_output: Bytes kept of each stream.
        """

    @abstractmethod
    async def spawn(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> SandboxProcess:
        """Start a long-running command: a shell, an interpreter, a server. Closing the sandbox kills it.

        Raises:
            SandboxFileNotFound: ``cwd`` is not a folder, or the program is missing.
        """

    @abstractmethod
    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a file's content.

        Raises:
            SandboxFileNotFound: There is no such file.
            SandboxFileTooLarge: It exceeds ``max_bytes``.
            SandboxFileError: It is not a regular file, or not readable.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file, creating parent folders.

        Args:
            path: Absolute, or relative to the workdir.
            data: The new content.
            mode: Permissions; None keeps those of an existing file (0o644 for a new one).

        Raises:
            SandboxFileError: It is not writable, or exceeds a limit (the message says which).
        """

    @abstractmethod
    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder to ``target``; a folder is merged into an existing one.

        Symbolic links are copied as links; devices and sockets are skipped.

        Raises:
            FileNotFoundError: ``source`` does not exist.
            SandboxFileError: ``target`` is not writable, or a limit is exceeded.
        """

    @abstractmethod
    async def download(self, source: str, target: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Copy a file or folder to ``target`` on the host.

        Nothing is written outside ``target``: links and names that lead out are skipped, as are devices and sockets. A
        growing file is copied as of one moment; one that vanishes or changes kind is skipped.

        Raises:
            SandboxFileNotFound: ``source`` does not exist.
            SandboxFileTooLarge: It exceeds ``max_bytes``.
            SandboxFileError: It is not readable, or a file shrank while it was read.
        """

    @abstractmethod
    async def snapshot(self) -> str:
        """Snapshot the files, without processes; return the name for ``spec.snapshot``. Raises SandboxUnavailable.

        Snapshots are removed when the manager closes, or by the backend's ``drop_snapshot``.
        """

    @abstractmethod
    async def fork(self, count: int = 1) -> Sequence[Sandbox]:
        """Return independent copies of this sandbox, all of one freeze of its files; this one continues.

        A fork has the files (those that a snapshot keeps) and the spec with its limits, mounts and variables. Processes
        continue in forks only with ``capabilities.fork_processes``; else a fork starts without any, and a file that a
        process is writing is copied as it is. Handles of spawned commands remain the original's in either case. Exposed
        addresses are not copied.

        A backend may defer the start of a fork to its first use, which then raises SandboxStartError. Either all forks
        are made or none.

        Args:
            count: Number of forks, at least 1.

        Raises:
            ValueError: ``count`` is below 1.
            SandboxUnavailable: The backend cannot fork, or not now; the message says why.
            SandboxStartError: A fork did not start.
        """


def check_sources(spec: SandboxSpec) -> None:
    """Check the host's files of a spec. Raises SandboxUnavailable."""
    if spec.workspace is not None and not spec.workspace.is_dir():
        raise SandboxUnavailable(f"spec.workspace {str(spec.workspace)!r} is not a folder on this machine")
    for mount in spec.mounts:
        if not mount.source.exists():
            raise SandboxUnavailable(f"spec.mounts: {str(mount.source)!r} does not exist on this machine")


def check_count(count: int) -> None:
    """Check a number of forks. Raises ValueError."""
    if count < 1:
        raise ValueError(f"count is {count}: the number of forks of a sandbox is at least 1")


class SandboxBackend(ABC):
    """A configured kind of sandboxes: creates them, and reaps leftovers of dead hosts."""

    name: ClassVar[str]

    @abstractmethod
    async def probe(self) -> Capabilities:
        """Probe this machine; SandboxUnavailable names the remedy."""

    @abstractmethod
    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox."""

    @abstractmethod
    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; a missing one is ignored."""

    @abstractmethod
    async def reap(self) -> int:
        """Remove leftovers of dead hosts on this machine; return the number of sandboxes."""

    @abstractmethod
    async def close(self) -> None:
        """Free the backend's own resources and snapshots, after its sandboxes were closed."""
