"""Guest program of E2B sandboxes: one file operation, as the user of commands."""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from turnwise.sandboxes.packing import extract_archive, write_archive


def fail(code: int, reason: object) -> None:
    """Exit with a code and a message."""
    sys.stderr.write(str(reason))
    sys.stderr.flush()
    os._exit(code)


def open_regular(path: str) -> int:
    """Open a regular file without blocking on a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        fail(46, "it is not a regular file")
    return descriptor


def read(path: str, max_bytes: str, inline: str) -> None:
    """Print a file's content or, if it is large, its real path."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > int(max_bytes):
            fail(45, f"it holds {size} bytes, more than max_bytes={max_bytes}")
        if size > int(inline):
            sys.stderr.write(os.path.realpath(path))
            return
        data = file.read(int(inline) + 1)
    if len(data) > int(max_bytes):
        fail(45, f"it holds more than max_bytes={max_bytes}")
    sys.stdout.buffer.write(data)


def write(path: str, mode: str) -> None:
    """Write the input to a file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = not os.path.exists(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        fail(46, "it is not a regular file")
    os.ftruncate(descriptor, 0)
    with open(descriptor, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        if mode or new:
            os.fchmod(file.fileno(), int(mode or 0o644))


def unpack(path: str) -> None:
    """Extract an archive into a folder."""
    extract_archive(sys.stdin.buffer, path)


def pack(path: str, max_bytes: str) -> None:
    """Pack a folder into an archive and print the archive's path; for a file print the file's path."""
    if not stat.S_ISDIR(os.stat(path).st_mode):
        status = os.fstat(open_regular(path))
        if status.st_size > int(max_bytes):
            fail(45, f"it holds {status.st_size} bytes, more than max_bytes={max_bytes}")
        sys.stdout.write(f"file {os.path.realpath(path)}")
        sys.stderr.write(str(status.st_mode & 0o777))
        return
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except FileNotFoundError:
                continue  # removed since it was listed
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    if total > int(max_bytes):
        fail(45, f"its files hold {total} bytes, more than max_bytes={max_bytes}")
    descriptor, name = tempfile.mkstemp(prefix=".turnwise-", dir="/tmp")
    with open(descriptor, "wb") as file:
        write_archive(path, file)
    sys.stdout.write(f"folder {name}")


def main() -> None:
    """Execute the operation of the command line."""
    # A path of 4,096 bytes, the longest, names 2,048 folders, and os.makedirs calls itself for each of them.
    sys.setrecursionlimit(5_000)
    try:
        operations: dict[str, Callable[..., None]] = {"read": read, "write": write, "unpack": unpack, "pack": pack}
        operations[sys.argv[1]](*sys.argv[2:])
        sys.stdout.flush()
    except FileNotFoundError as error:
        fail(44, error.strerror)
    except OSError as error:
        fail(46, f"{error.strerror} ({error.filename})")


main()
