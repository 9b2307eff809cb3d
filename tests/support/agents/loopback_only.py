"""Starts a program in a network namespace whose only interface is loopback, beside a socket that others serve.

A script of its own: ``unshare --net python loopback_only.py FD`` raises the loopback, listens on a port of it, hands
the listening socket over the Unix socket FD, and waits there for one line of JSON: ``argv``, ``cwd`` and ``env`` of the
program that it then becomes. The program is answered from another namespace, by the process that received the socket.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys

SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1


def main(descriptor: int) -> None:
    """Never returns: becomes the program."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    interfaces = [name for _, name in socket.if_nameindex()]
    assert interfaces == ["lo"], f"this is no namespace of its own: {interfaces}"
    control = socket.socket(fileno=descriptor)
    with socket.socket() as listener:
        # Connections inherit it; without it each answer waits 40 ms for a delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        socket.send_fds(control, [b"."], [listener.fileno()])
    with control.makefile("rb") as lines:
        program = json.loads(lines.readline())
    control.close()
    os.chdir(program["cwd"])
    os.execvpe(program["argv"][0], program["argv"], program["env"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
