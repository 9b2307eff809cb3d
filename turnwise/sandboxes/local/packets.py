"""The host's end of a socket of packets, whose other end is a launcher or the agent of a sandbox."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final

_MAX_PACKET: Final = 60_000
"""Bytes that fit into one packet; more are passed as a memory file."""


class PacketSocket(ABC):
    """Packets with descriptors over an owned socket; the host never waits for the other end."""

    def __init__(self, end: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._receive)

    @property
    def dead(self) -> bool:
        """Whether one of the two ends is closed."""
        return self._end.fileno() < 0

    def close(self) -> None:
        """Close this end; idempotent."""
        if self.dead:
            return
        self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())
        self._end.close()
        while self._queue:
            _close_all(self._queue.popleft()[1])
        self._lose()

    @abstractmethod
    def _take(self, data: bytes, fds: list[int]) -> None:
        """Take a packet and its descriptors."""

    @abstractmethod
    def _lose(self) -> None:
        """Take notice that this end is closed."""

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        """Send a packet, or queue it while the other end is busy; its descriptors may be closed at once.

        Raises:
            BrokenPipeError: One of the ends is closed.
            OSError: There are too many descriptors.
        """
        if len(data) > _MAX_PACKET:
            memory = memory_file(data)
            try:
                self._send(b"memfd", (memory, *fds))
            finally:
                os.close(memory)
            return
        if not self.dead:
            self._queue.append((data, [os.dup(fd) for fd in fds]))
            if len(self._queue) == 1:
                self._flush()
        if self.dead:
            raise BrokenPipeError("the other end is closed")

    def _flush(self) -> None:
        while self._queue:
            data, fds = self._queue[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._end.sendmsg([data], ancillary)
            except BlockingIOError:
                self._loop.add_writer(self._end.fileno(), self._flush)
                return
            except OSError:
                self.close()
                return
            _close_all(self._queue.popleft()[1])
        self._loop.remove_writer(self._end.fileno())

    def _receive(self) -> None:
        for _ in range(64):
            try:
                data, fds, _, _ = socket.recv_fds(self._end, 65_536, 4, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                return
            self._take(data, fds)


def memory_file(data: bytes) -> int:
    """Return a memory file (memfd) with some bytes, positioned at its start."""
    fd = os.memfd_create("turnwise")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
