"""Files of runs and gateways, for their owner only, and append-only files of lines.

An append is whole or absent, also across kills and full disks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from turnwise.errors import DiskError, TurnwiseError, undo_on_error


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


def is_locked(path: Path) -> bool:
    """Return whether a process has the directory by :func:`lock_directory`; False where there are no locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Shared, so that two processes that ask do not take each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def private_opener(path: str, flags: int) -> int:
    """Open a file, created for its owner only: an ``opener`` for the built-in open."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, data: str | bytes) -> None:
    """Write a file for its owner only, text as UTF-8."""
    with open(path, "wb", opener=private_opener) as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, mark: str = "draft") -> None:
    """Write a file for its owner only, or replace it: whole or not at all, also across a power cut.

    Processes that may write it at the same time need a ``mark`` each.
    """
    draft = path.with_name(f".{path.name}.{mark}")
    with undo_on_error(lambda: draft.unlink(missing_ok=True)):
        write_private(draft, data)
        sync_path(draft)
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

    Where the disk refuses, all raise DiskError. A torn last line that a killed process left is removed with ``cut``,
    else terminated and left unreadable.
    """

    def __init__(self, path: Path, *, cut: bool = False) -> None:
        self._path, self._closed = path, False
        with writing(path):
            private_directory(path.parent)
            self._file = private_opener(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self.size = os.fstat(self._file).st_size
        if self.size and os.pread(self._file, 1, self.size - 1) != b"\n":
            if cut:
                self.truncate(_last_line(self._file, self.size))
            else:
                self.append(b"")

    def append(self, line: bytes) -> int:
        """Append one line (without its line break), whole or not at all; return its byte offset."""
        with writing(self._path):
            append_whole(self._file, line + b"\n")
        begins, self.size = self.size, self.size + len(line) + 1
        return begins

    def read(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from ``offset``; fewer at the end of the file."""
        return os.pread(self._file, length, offset)

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes."""
        with writing(self._path):
            os.ftruncate(self._file, size)
        self.size = size

    def sync(self) -> None:
        """Fsync the file: what was appended survives a power cut."""
        if not self._closed:
            with writing(self._path):
                os.fsync(self._file)

    def close(self) -> None:
        """Close the file; idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._file)


def raise_file_limit(files: int) -> float:
    """Have this process open ``files`` files at least, as far as its user may; return how many it may open."""
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(_FILES))
    if soft < files:
        soft = min(files, hard)
        # Refused where the system has a lower limit of its own (macOS).
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(_FILES, (int(soft), resource.getrlimit(_FILES)[1]))
    return soft


_FILES = resource.RLIMIT_NOFILE
_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.EROFS: "mount its file system writable",
    errno.EACCES: "let this user write there",
}


def write_remedy(error: Exception) -> str:
    """Return what helps where a disk refuses: by default room, also where a library raised its own exception."""
    named = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(named[1]) if named else None
    return _REMEDIES.get(number or 0, "make room on its file system")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a DiskError that says what it means for the run."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{path} cannot be written: {error.strerror or error}: {write_remedy(error)} and give the same "
            "command again: it resumes, and nothing that was recorded before is lost"
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
