"""A program that asks its session once, then tries to reach everything else, and prints what it reached as JSON.

Its argument is a file of JSON: ``ports`` on the host's loopback that something listens at, ``paths`` that are asked for
at the socket of its own session, ``key`` that is sent there, ``hosts`` of the machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import urllib.parse
from typing import Any


def ask(port: int, method: str, path: str, body: str = "", **headers: str) -> int:
    """Return the status of an answer at 127.0.0.1, 0 where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def connects(host: str, port: int) -> bool:
    """Return whether something accepts a connection."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def resolves(name: str) -> bool:
    """Return whether a name has an address."""
    try:
        socket.getaddrinfo(name, 80)
    except OSError:
        return False
    return True


def sends() -> bool:
    """Return whether a datagram leaves for another machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.sendto(b"x", ("192.0.2.1", 53))
        except OSError:
            return False
    return True


def listeners() -> list[int]:
    """Return the TCP ports that somebody listens at in this network."""
    ports = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}") as table:
            for line in table.readlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == "0A":
                    ports.add(int(local.rpartition(":")[2], 16))
    return sorted(ports)


def flood(port: int) -> int:
    """Open many connections and say nothing; return how many were taken."""
    connections = []
    with contextlib.suppress(OSError):
        for _ in range(300):
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=2))  # noqa: PERF401 - some may be taken
    for connection in connections:
        connection.close()
    return len(connections)


def main() -> int:
    """Try everything."""
    with open(sys.argv[1]) as file:
        targets = json.load(file)
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    assert url.port is not None
    chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Go."}]})
    route, key = f"{url.path}/chat/completions", f"Bearer {targets['key']}"
    report: dict[str, Any] = {
        "asked": ask(url.port, "POST", route, chat),
        "ports": [port for port in targets["ports"] if any(connects(host, port) for host in targets["hosts"])],
        "paths": [ask(url.port, method, path, body, authorization=key) for method, path, body in targets["paths"]],
        "interfaces": [name for _, name in socket.if_nameindex()],
        "listeners": [port for port in listeners() if port != url.port],
        "names": resolves("localhost.example.com"),
        "datagrams": sends(),
        "flooded": flood(url.port),
        "asked_again": ask(url.port, "POST", route, chat),
        "secrets": sorted(name for name in os.environ if "SECRET" in name),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
