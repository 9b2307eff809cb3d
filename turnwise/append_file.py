"""Files of runs and gateways, for their owner only, and append-only files of lines.

An append is whole or absent, also across kills and full disks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from turnwise.errors import DiskError, TurnwiseError


def private_directory(path: Path) -> None:
    """Create a directory for its owner only, if missing; missing parents get the usual mode."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def lock_directory(path: Path, kind: type[TurnwiseError], use: str) -> Iterator[None]:
    """Create a directory for its owner only, and lock it for the block; the lock ends with the process.

    It is removed again if nothing was written to it.

    Args:
        path: The directory.
        kind: The class of the error.
        use: What is in the directory, such as ``the run``, for the error.

    Raises:
        TurnwiseError: Another process has it, of class ``kind``.
        DiskError: It cannot be created.
    """
    with writing(path):
        private_directory(path)
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise kind(
                f"another process is using {use} {path}: wait for it, stop it, or choose another directory"
            ) from None
        except OSError:
            # A file system without locks: used without one.
            pass
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.rmdir()


def private_opener(path: str, flags: int) -> int:
    """Open a file, created for its owner only: an ``opener`` for the built-in open."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, data: str | bytes) -> None:
    """Write a file for its owner only, text as UTF-8."""
    with open(path, "wb", opener=private_opener) as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file for its owner only, or replace it: whole or not at all, also across a power cut."""
    draft = path.with_name(f".{path.name}.draft")
    with open(draft, "wb", opener=private_opener) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


@contextlib.contextmanager
def drafted_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory that takes the place of ``target`` at the end of the block, and goes where it fails."""
    folder = target.absolute().parent
    for abandoned in folder.glob(f".draft-{target.name}-*"):
        # Of a process that was killed, or, by the same number, of one before a restart of the machine.
        process = Path("/proc", abandoned.name.rpartition("-")[2])
        if process.name == str(os.getpid()) or (Path("/proc/self").exists() and not process.exists()):
            shutil.rmtree(abandoned, ignore_errors=True)
    draft, replaced = (folder / f".{kind}-{target.name}-{os.getpid()}" for kind in ("draft", "replaced"))
    try:
        draft.mkdir(parents=True)
        yield draft
        if target.exists():
            target.rename(replaced)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


class AppendFile:
    """An append-only file of lines with a single writer; a line is in the file when :meth:`append` returns.

    A torn last line that a killed process left is removed with ``cut``, else terminated and left unreadable.
    """

    def __init__(self, path: Path, *, cut: bool = False) -> None:
        private_directory(path.parent)
        self._file = private_opener(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._closed = False
        self.size = os.fstat(self._file).st_size
        if self.size and os.pread(self._file, 1, self.size - 1) != b"\n":
            if cut:
                self.truncate(_last_line(self._file, self.size))
            else:
                append_whole(self._file, b"\n")
                self.size += 1

    def append(self, line: bytes) -> int:
        """Append one line (without its line break), whole or not at all; return its byte offset. Raises OSError."""
        append_whole(self._file, line + b"\n")
        begins, self.size = self.size, self.size + len(line) + 1
        return begins

    def read(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from ``offset``; fewer at the end of the file."""
        return os.pread(self._file, length, offset)

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes."""
        os.ftruncate(self._file, size)
        self.size = size

    def sync(self) -> None:
        """Fsync the file: what was appended survives a power cut."""
        if not self._closed:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file; idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._file)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a DiskError that says what it means for the run."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{path} cannot be written: {error.strerror or error}. Make room on its file system and give the same "
            "command again: the run resumes from its last checkpoint, and nothing recorded in the journal is lost"
        ) from error


def append_whole(file: int, data: bytes) -> None:
    """Append bytes; after a failed write none stay, since a torn line would swallow the next one."""
    bytes_written = 0
    try:
        while bytes_written < len(data):
            bytes_written += os.write(file, data[bytes_written:] if bytes_written else data)
    except OSError:
        if bytes_written:
            os.ftruncate(file, os.fstat(file).st_size - bytes_written)
        raise


def _last_line(file: int, size: int) -> int:
    block = 2**20
    while size > 0:
        begins = max(0, size - block)
        line_break = os.pread(file, size - begins, begins).rfind(b"\n")
        if line_break >= 0:
            return begins + line_break + 1
        size = begins
    return 0
