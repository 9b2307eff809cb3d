"""The contract of sandboxes: a place where code runs that nobody trusts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Self, TypeAlias

from turnwise.sandboxes.forwarding import Reaching

MAX_OUTPUT: Final = 65_536
"""Bytes that are kept of each of a command's two streams, half of them from its beginning and half from its end."""
MAX_FILE: Final = 64 * 2**20
"""Bytes of a file that is read, or of all files of a download together, unless the caller takes more."""
WORKDIR: Final = "/work"
"""Where commands run inside a sandbox, and what relative paths are relative to, unless its spec says otherwise."""

Command: TypeAlias = str | Sequence[str]
"""A text is run by ``bash -c`` (``sh -c`` where there is no bash), a sequence is a program and its arguments."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command left. A time-out and a failure are results, never exceptions.

    Attributes:
        exit_code: As a shell tells it: 127 for a program that is not there, 128 + n for one that signal n ended, 124
            where the time-out ended it.
        stdout: What it wrote; of more than ``max_output`` bytes, the head and the tail with a line between them that
            says how many are missing.
        stderr: The same of its other stream.
        timed_out: Whether it was ended, with everything that it had started, because its time was over.
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
        """Whether it ended by itself and said so with 0."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """Both streams as text, stdout first; bytes that are no UTF-8 are replaced."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What may be used inside. Every number is for the whole sandbox unless it says otherwise.

    Attributes:
        memory: Bytes of memory of all processes together.
        pids: Processes and threads at the same time.
        cpus: Processors' worth of time per second; None: as many as the machine has.
        cpu_seconds: Seconds of processor time that a single process may use; None: no bound but the time-outs.
        disk: Bytes that may be written to its file systems.
        file_size: Bytes of a single file.
        open_files: Open files of a single process.
        network: Whether it reaches the network. Without, it reaches nothing but what is exposed to it.
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
    """A folder or file of the host that is seen inside, and cannot be changed there.

    Attributes:
        source: Where it is on the host.
        target: Where it is seen inside, an absolute path.
    """

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is asked for. It travels: nothing in it is a live object.

    Attributes:
        image: What its root file system is: a name that the backend knows (of a container image; of a rootfs folder
            for ``local``), or None for the backend's own.
        workspace: A folder of the host whose content the workdir has at the start. Writes inside never reach it.
        snapshot: The name of a snapshot to begin from (:meth:`Sandbox.snapshot`) instead of image and workspace.
        workdir: Where commands run; made where it is not there.
        env: Environment variables of every command. Nothing of the host's environment is inherited.
        mounts: What of the host is seen inside, read-only.
        user: Who runs commands, where the backend has several users; None: an unprivileged one.
        limits: What may be used.
        labels: Names that tell its containers and processes apart for whoever looks.
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
    """What a sandbox really holds back, and what it can do, on this machine. Found by trying, not by configuration.

    Attributes:
        isolation: How, in one word: ``bubblewrap``, ``landlock``, ``plain``, ``docker``, ``docker/runsc``, ``e2b``.
        filesystem: Whether host files outside its own are out of reach, for reading and for writing.
        processes: Whether processes outside cannot be seen, signalled or traced.
        network: Whether the network, the host's loopback and abstract sockets are out of reach (limits.network False).
        memory: Whether ``limits.memory`` holds for all processes together (not each on its own).
        pids: Whether ``limits.pids`` holds.
        disk: Whether ``limits.disk`` holds.
        kernel: Whether what no sandbox needs of the kernel is out of reach: settings under ``/proc/sys``, keyrings,
            mounts, device nodes, namespaces of its own.
        survives_host: Whether it lives on when the host process is killed, until a reaper ends it.
        snapshots: Whether :meth:`Sandbox.snapshot` and :meth:`Sandbox.fork` work.
        expose: Whether ``listen`` and ``expose`` of a sandbox work.
        images: Whether ``spec.image`` is taken.
        notes: In words, what it does not hold back and why.
    """

    isolation: str
    filesystem: bool = True
    processes: bool = True
    network: bool = True
    memory: bool = True
    pids: bool = True
    disk: bool = True
    kernel: bool = True
    survives_host: bool = False
    snapshots: bool = True
    expose: bool = True
    images: bool = True
    notes: tuple[str, ...] = ()


class SandboxProcess(ABC):
    """A command that goes on: its input can be written and its output read while it runs.

    Its two output streams are one, in the order in which they were written.
    """

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to its input.

        Raises:
            BrokenPipeError: It has ended, or closed its input.
        """

    @abstractmethod
    async def read(self, max_bytes: int = MAX_OUTPUT) -> bytes:
        """Return output as soon as there is any; empty where it has ended and all was read."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """Close its input. Closing twice is no error."""

    @abstractmethod
    async def interrupt(self) -> None:
        """Send SIGINT to the command's process group, as Ctrl-C does. Nothing happens where it has ended."""

    @abstractmethod
    async def kill(self) -> None:
        """End it with everything that it started. Nothing happens where it has ended."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for its end and return its exit code, as a shell tells it."""


class Sandbox(Reaching, ABC):
    """One place in which commands run: started once, closed once, any number of commands at the same time.

    An async context manager: entering starts it, leaving closes it. Whatever path is given is resolved inside: no path
    and no link leads out of the sandbox.

    Args:
        spec: What is asked for.

    Attributes:
        backend: The registered name of its kind.
        spec: What was asked for.
        id: Names it, unique on this machine.
        capabilities: What it holds back; known once it has started.
    """

    backend: ClassVar[str]
    spec: SandboxSpec
    id: str
    capabilities: Capabilities

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def start(self) -> None:
        """Start it. A start that fails or is cancelled leaves nothing behind.

        Raises:
            SandboxUnavailable: This machine cannot give what the spec asks for.
            SandboxStartError: It did not start; trying again may help.
        """

    @abstractmethod
    async def close(self) -> None:
        """End everything inside and free what it holds. Closing twice, or before a start, is no error."""

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

        It ends when the program that was started ends: what that left in the background runs on, and its output is
        dropped from then on. Cancelled, the command is ended like one whose time is over.

        Args:
            command: What is run.
            timeout: Seconds after which it is ended with everything that it started, however that hid itself. The
                sandbox, and what other commands left in the background, live on. None: no bound.
            cwd: Where, absolute or relative to the workdir.
            env: Variables besides those of the spec.
            stdin: Its input; without, it is empty.
            max_output: Bytes that are kept of each stream.

        Raises:
            SandboxFileNotFound: ``cwd`` is no folder.
            SandboxDied: The sandbox ended before the command did.
        """

    @abstractmethod
    async def spawn(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> SandboxProcess:
        """Start a command that goes on: a shell, an interpreter, a server. Closing the sandbox ends it.

        Raises:
            SandboxFileNotFound: ``cwd`` is no folder, or there is no such program.
            SandboxDied: The sandbox has ended.
        """

    @abstractmethod
    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return what a file inside holds.

        Raises:
            SandboxFileNotFound: There is no such file.
            SandboxFileTooLarge: It holds more than ``max_bytes``.
            SandboxFileError: It is no regular file, or may not be read.
            SandboxDied: The sandbox has ended.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file inside, with the folders above it.

        Args:
            path: Absolute, or relative to the workdir.
            data: What it holds then.
            mode: Its permissions; None keeps those of a file that is there (0o644 for a new one).

        Raises:
            SandboxFileError: It may not be written, or a limit holds it back (the message says which).
            SandboxDied: The sandbox has ended.
        """

    @abstractmethod
    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or a folder of the host to the path ``target`` inside; a folder's content is merged into it.

        Symbolic links travel as links, devices and sockets not at all.

        Raises:
            FileNotFoundError: There is no such thing on the host.
            SandboxFileError: It may not be written, or a limit holds it back.
            SandboxDied: The sandbox has ended.
        """

    @abstractmethod
    async def download(self, source: str, target: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Copy a file or a folder inside to the path ``target`` on the host.

        Nothing is written outside ``target``, whatever names and links there are inside: what would lead out is left
        out, and so are devices and sockets. Of a file that grows meanwhile comes what it held at one moment; what goes
        away or becomes something else meanwhile is left out.

        Raises:
            SandboxFileNotFound: There is no such thing inside.
            SandboxFileTooLarge: It holds more than ``max_bytes``.
            SandboxFileError: It may not be read, or a file became shorter while it was read.
            SandboxDied: The sandbox has ended.
        """

    @abstractmethod
    async def snapshot(self) -> str:
        """Keep the files as they are now, and return the name that a spec begins from (``spec.snapshot``).

        Processes are not kept. Snapshots are removed when the host's manager closes, or by :func:`drop_snapshot` of
        the backend.

        Raises:
            SandboxUnavailable: This backend cannot.
            SandboxDied: The sandbox has ended.
        """

    @abstractmethod
    async def fork(self) -> Sandbox:
        """Return a started sandbox of the same spec whose files are what these are now.

        Raises:
            SandboxUnavailable: This backend cannot.
            SandboxStartError: It did not start.
            SandboxDied: The sandbox has ended.
        """


class SandboxBackend(ABC):
    """One kind of sandboxes, as configured: makes them, and removes what dead hosts left of them.

    Attributes:
        name: Its registered name.
    """

    name: ClassVar[str]

    @abstractmethod
    async def probe(self) -> Capabilities:
        """Try what this machine gives.

        Raises:
            SandboxUnavailable: Nothing that may be used; the message names the remedy.
        """

    @abstractmethod
    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox that was not started."""

    @abstractmethod
    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot. One that is not there is no error."""

    @abstractmethod
    async def reap(self) -> int:
        """Remove what hosts that are dead left on this machine, and return how many sandboxes that were."""

    @abstractmethod
    async def close(self) -> None:
        """Free what the backend itself holds, snapshots included. Its sandboxes are closed before."""


_SLACK: Final = 65_536
"""Bytes that the tail may be longer than needed before it is cut: cutting at every byte would copy it every time."""


class Kept:
    """The head and the tail of what is written.

    Args:
        most: Bytes that are kept.

    Attributes:
        total: Bytes that were written.
    """

    __slots__ = ("_head", "_most", "_tail", "total")

    def __init__(self, most: int) -> None:
        self.total = 0
        self._most = most
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def truncated(self) -> bool:
        """Whether more was written than is kept."""
        return self.total > self._most

    @property
    def data(self) -> bytes:
        """What is kept, with a line in the place of what is missing."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        tail = self._tail[len(self._tail) - (self._most - self._most // 2) :]
        return bytes(self._head) + b"\n[%d bytes are missing here]\n" % (self.total - self._most) + bytes(tail)

    def add(self, data: bytes) -> None:
        """Take what was written."""
        self.total += len(data)
        room = max(self._most // 2 - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        most = self._most - self._most // 2
        if len(self._tail) > 2 * most + _SLACK:
            del self._tail[: len(self._tail) - most]
