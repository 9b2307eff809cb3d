"""Attacks on the kernel's interfaces. Each only opens or makes something, and undoes it at once."""

import contextlib
import ctypes
import os
import platform
import stat
from typing import Any

_CALLS = {  # add_key, keyctl
    "x86_64": (248, 250),
    "aarch64": (217, 219),
}
_NAMESPACES = {"user": 0x10000000, "mount": 0x00020000, "net": 0x40000000, "pid": 0x20000000}


def settings(given: dict[str, Any]) -> list[str]:
    """Open settings of the kernel for writing; nothing is written."""
    del given
    paths = (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sysrq-trigger",
        "/sys/kernel/uevent_helper",
        "/proc/sys/kernel/core_uses_pid",
    )
    got = []
    for path in paths:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            got.append(path)
    return got


def keyrings(given: dict[str, Any]) -> list[str]:
    """Ask for keyrings, which are shared with whoever is of the same user or session outside."""
    del given
    calls = _CALLS.get(platform.machine())
    if calls is None:
        raise SystemExit(f"the system calls of {platform.machine()} are not known to this attack")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    got = []
    for name, keyring in (("session", -3), ("user", -4), ("user session", -5)):
        if libc.syscall(calls[1], 0, ctypes.c_long(keyring), 0) > 0:  # KEYCTL_GET_KEYRING_ID
            got.append(f"the {name} keyring")
    return got


def namespaces(given: dict[str, Any]) -> list[str]:
    """Make namespaces, each in a child that ends at once."""
    del given
    got = []
    for name, flag in _NAMESPACES.items():
        if _in_child(lambda flag=flag: ctypes.CDLL(None, use_errno=True).unshare(flag) == 0):
            got.append(f"unshare of the {name} namespace")
    return got


def mounts(given: dict[str, Any]) -> list[str]:
    """Mount a file system over an own folder, plainly and in a user namespace of its own; it is unmounted at once."""
    folder = os.path.join(given["folder"], "mounted")
    os.makedirs(folder, exist_ok=True)
    got = []

    def mount() -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        made = libc.mount(b"none", folder.encode(), b"tmpfs", 0, None) == 0
        if made:
            libc.umount2(folder.encode(), 2)
        return bool(made)

    def in_namespace() -> bool:
        return ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x00020000) == 0 and mount()

    if _in_child(mount):
        got.append("mount of a tmpfs")
    if _in_child(in_namespace):
        got.append("mount of a tmpfs in a user namespace")
    return got


def devices(given: dict[str, Any]) -> list[str]:
    """Open devices of the machine for reading, and make a node of the device that is its memory."""
    got = []
    for path in (
        "/dev/mem",
        "/dev/kmsg",
        "/dev/sda",
        "/dev/vda",
        "/dev/nvme0n1",
        "/dev/loop0",
        "/dev/kvm",
        "/dev/fuse",
    ):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            got.append(path)
    path = os.path.join(given["folder"], "node")
    with contextlib.suppress(OSError):
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 1))
        try:
            os.close(os.open(path, os.O_RDONLY))
            got.append("mknod of /dev/mem")
        finally:
            os.remove(path)
    return got


def _in_child(attempt: Any) -> bool:
    """Return whether an attempt succeeds in a process of its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(OSError):
            code = 0 if attempt() else 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


ATTACKS = {
    "settings": settings,
    "keyrings": keyrings,
    "namespaces": namespaces,
    "mounts": mounts,
    "devices": devices,
}
