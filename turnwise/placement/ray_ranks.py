"""Rank processes of a sharded learner on the nodes of a Ray cluster, each with a connection to this process."""

from __future__ import annotations

import hmac
import secrets
import socket
import subprocess
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGKILL
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_node_ip_address

from turnwise.errors import PlacementError
from turnwise.placement.core import RANK_TOKEN, Program, RankCommand, RankHosts, StartedRank
from turnwise.placement.ray_cluster import RayCluster, Slot
from turnwise.placement.ray_hosts import ProcessHost, kill

_TOKEN_BYTES = 32
_POLL = 0.5


class RayRanks(RankHosts):
    """Starts the ranks of one learner.

    Args:
        cluster: Where they start.
        logs: Where their output goes, a folder that all nodes share.
    """

    def __init__(self, cluster: RayCluster, logs: Path) -> None:
        self.host = get_node_ip_address()
        self._cluster = cluster
        self._logs = logs

    def launch(self, rank: int, command: RankCommand, threads: int, timeout: float) -> StartedRank:
        """Start a rank; see :meth:`RankHosts.launch`."""
        token = secrets.token_hex(_TOKEN_BYTES)
        log = self._logs / f"rank-{rank}.log"
        server = socket.create_server((self.host, 0))
        link = f"{self.host}:{server.getsockname()[1]}"
        variables = {"OMP_NUM_THREADS": str(threads), RANK_TOKEN: token}
        line = partial(command, link)
        program = Program(f"rank {rank}", "rank", line, lambda parent: {**parent, **variables}, log)
        slot = self._cluster.claim("rank")
        actor = self._cluster.actor(ProcessHost, slot, program.what)
        process = RayRank(actor, slot, self._cluster, actor.start.remote(program))
        return process, partial(_accept, server, process, token, log, timeout), log


def _accept(server: socket.socket, process: RayRank, token: str, log: Path, timeout: float) -> Connection:
    with server:
        try:
            process.started(timeout)
            return _accept_token(server, process, token, time.monotonic() + timeout)
        except (GetTimeoutError, TimeoutError) as error:
            raise PlacementError(f"it did not connect within {timeout:g} s; its log is {log}") from error
        except RayError as error:
            if isinstance(error, OSError):
                raise
            raise PlacementError(" ".join(str(error).split())[:300]) from error


class RayRank:
    """A rank's process, with the part of a ``subprocess.Popen`` that is read of it."""

    def __init__(self, actor: Any, slot: Slot, cluster: RayCluster, start: Any) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._actor = actor
        self._slot = slot
        self._cluster = cluster
        self._start = start
        self._end: Any = None

    def started(self, timeout: float) -> None:
        """Wait for its start. Raises OSError, RayError or GetTimeoutError."""
        self.pid, _ = ray.get(self._start, timeout=timeout)

    def poll(self) -> int | None:
        """Return its exit code, or the negative number of a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if self._end is None:
                self._end = self._actor.wait.remote()
            ready, _ = ray.wait([self._end], timeout=timeout)
            if not ready:
                raise subprocess.TimeoutExpired(f"rank (process {self.pid})", timeout or 0.0)
            try:
                self.returncode = int(ray.get(self._end)[0])
            except RayError:
                # With its actor or its node.
                self.returncode = -SIGKILL
            kill(self._actor)
            self._cluster.release(self._slot)
        return self.returncode

    def kill(self) -> None:
        """Kill it, with its actor."""
        kill(self._actor)


def _accept_token(server: socket.socket, process: RayRank, token: str, deadline: float) -> Connection:
    """Accept the connection that begins with the token. Raises TimeoutError, or PlacementError if the rank ended."""
    server.settimeout(_POLL)
    while True:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            if process.poll() is not None:
                raise PlacementError(f"its process ended ({process.returncode}) before it connected") from None
            if time.monotonic() > deadline:
                raise
            continue
        connection.settimeout(10)
        with suppress(OSError):
            received = connection.recv(len(token), socket.MSG_WAITALL)
            if hmac.compare_digest(received, token.encode()):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return Connection(connection.detach())
        connection.close()
