"""Linux system calls without a Python function."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same numbers on every architecture
_OPEN_TREE_CLONE, _MOVE_FROM_EMPTY_PATH, _ATTR_IDMAP = 1, 4, 0x00100000

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """Return a call's result.

    Raises:
        OSError: The call failed.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave namespaces for new ones.

    Raises:
        OSError: It is not allowed.
    """
    checked(libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system or bind a path.

    Raises:
        OSError: It is not allowed, or the source does not exist.
    """
    encoded = [None if argument is None else os.fsencode(argument) for argument in (source, target, kind, options)]
    result = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    checked(result, f"mounting {kind or source} at {target}")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process.

    Raises:
        OSError: It is not allowed.
    """
    checked(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends; it ends here if that has happened already.

    Raises:
        OSError: It is not allowed.
    """
    prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(1)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def bind_as(source: str, target: str, userns: int) -> None:
    """Bind a folder with its owners mapped by a user namespace.

    Raises:
        OSError: Not allowed, or this kernel or file system cannot.
    """
    tree = checked(
        libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC), "open_tree"
    )
    try:
        attributes = _MountAttributes(_ATTR_IDMAP, 0, 0, userns)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        checked(
            libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), size), "mount_setattr"
        )
        checked(
            libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_FROM_EMPTY_PATH), "move_mount"
        )
    finally:
        os.close(tree)


def user_namespace(inner_id: int, outer_id: int) -> int:
    """Return a descriptor of a user namespace that maps one user and group to another.

    Raises:
        OSError: It is not allowed.
    """
    ready, ready_writer = os.pipe()
    release, release_writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(ready)
        os.close(release_writer)
        try:
            unshare(CLONE_NEWUSER)
            os.write(ready_writer, b"1")
            os.read(release, 1)
        finally:
            os._exit(0)
    os.close(ready_writer)
    os.close(release)
    try:
        if not os.read(ready, 1):
            raise OSError(1, "unshare: a user namespace is not allowed")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(f"{inner_id} {outer_id} 1")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(release_writer)
        os.close(ready)
        os.waitpid(child, 0)


def enter_user_namespace() -> None:
    """Move this root process into a new user namespace with the same users and groups.

    Raises:
        OSError: It is not allowed.
    """
    release, release_writer = os.pipe()
    this = os.getpid()
    helper = os.fork()
    if not helper:
        # A process inside the namespace may map only itself: the map is written from outside.
        os.close(release_writer)
        status = 1
        try:
            if os.read(release, 1):
                for name in ("uid_map", "gid_map"):
                    with open(f"/proc/self/{name}") as file:
                        ranges = [line.split() for line in file]
                    with open(f"/proc/{this}/{name}", "w") as file:
                        file.write("".join(f"{first} {first} {count}\n" for first, _, count in ranges))
                status = 0
        finally:
            os._exit(status)
    os.close(release)
    try:
        unshare(CLONE_NEWUSER)
        os.write(release_writer, b"1")
    finally:
        os.close(release_writer)
        _, status = os.waitpid(helper, 0)
    if status:
        raise OSError(1, "unshare: the users of a user namespace may not be set")
