"""A socket that listens in the network namespace of another process.

Owns: :func:`listen_in`. Refuses: finding out which process that is.

A process of its own enters the namespace, since threads of this one must stay where they are, and hands the socket
over. That needs the right to enter: root's, or a namespace that belongs to a user namespace of this user's.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Final

from turnwise.errors import SandboxError, SandboxUnavailable

_SECONDS: Final = 20.0
_REFUSED: Final = 3
# Enters the user namespace first where it may not enter the other one at once: as its owner it then may.
_PROGRAM: Final = """
import ctypes, os, socket, sys
pid, port, channel = sys.argv[1], int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
libc = ctypes.CDLL(None, use_errno=True)
def enter(name):
    there = os.open("/proc/" + pid + "/ns/" + name, os.O_RDONLY)
    if libc.setns(there, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.close(there)
try:
    here = os.open("/proc/" + pid + "/ns/net", os.O_RDONLY)
    if libc.setns(here, 0):
        enter("user")
        enter("net")
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
made = socket.socket()
try:
    made.bind(("127.0.0.1", port))
    made.listen(256)
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
socket.send_fds(channel, [b"."], [made.fileno()])
"""


async def listen_in(pid: int, port: int = 0) -> socket.socket:
    """Return a socket that listens at 127.0.0.1 in the network namespace of a process.

    Args:
        pid: The process, as this one sees it.
        port: Where; 0 takes a free one.

    Raises:
        SandboxUnavailable: The namespace may not be entered.
        SandboxError: The process is gone, or the port is taken.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _PROGRAM, str(pid), str(port), str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_SECONDS):
                _, said = await process.communicate()
        except BaseException:  # also a time-out or a cancellation: the process is killed
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        if process.returncode == 0:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
            return socket.socket(fileno=descriptors[0])
    why = said.decode(errors="replace").strip() or f"exit status {process.returncode}"
    if process.returncode == _REFUSED:
        raise SandboxUnavailable(f"the network of process {pid} cannot be entered: {why}; run as root")
    raise SandboxError(f"port {port} of the sandbox cannot be listened on: {why}")
