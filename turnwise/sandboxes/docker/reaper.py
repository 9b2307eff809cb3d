"""The reaper process: outlives its host and removes the host's containers and images.

Arguments: engine URL, label of the token, host pid, folder. Its input is a pipe held by the host.
"""

import contextlib
import http.client
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import urllib.parse

_ROUNDS = 20
_CLEAN_ROUNDS = 2


class Connection(http.client.HTTPConnection):
    """An HTTP connection to a unix socket or an address."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self.path = rest if scheme.endswith("unix") else ""
        super().__init__("localhost" if self.path else rest.rstrip("/"), timeout=60)

    def connect(self) -> None:
        """Connect."""
        if not self.path:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self.path)


def request(url: str, method: str, path: str) -> tuple[int, bytes]:
    """Make one request; return status and body."""
    connection = Connection(url)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def remove_labelled(url: str, label: str) -> int:
    """Remove everything with a label; return the count."""
    filters = urllib.parse.quote(json.dumps({"label": [label]}))
    count = 0
    for kind, options, rows in (
        ("containers", "force=1&v=1", f"/containers/json?all=1&filters={filters}"),
        ("images", "force=1", f"/images/json?filters={filters}"),
    ):
        status, body = request(url, "GET", rows)
        for row in json.loads(body) if status == http.client.OK else []:
            count += 1
            request(url, "DELETE", f"/{kind}/{row['Id']}?{options}")
    return count


def start_time(pid: int) -> str:
    """Return a process's start time, empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def wait_for_end(pid: int) -> None:
    """Wait until the pipe closes or, where a child of the host holds it too, the host is gone."""
    original = start_time(pid)
    while original and start_time(pid) == original:
        if select.select([0], [], [], 1.0)[0] and not os.read(0, 1):
            return


def main(url: str, label: str, pid: int, folder: str) -> None:
    """Wait for the host's end, and clean up until nothing new appears."""
    for signal_number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    wait_for_end(pid)
    shutil.rmtree(folder, ignore_errors=True)
    clean = 0
    for number in range(_ROUNDS):
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            clean = 0 if remove_labelled(url, label) else clean + 1
        if clean == _CLEAN_ROUNDS:
            return
        # Containers in creation at the host's death appear a little later.
        time.sleep(0.2 + 0.1 * number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
