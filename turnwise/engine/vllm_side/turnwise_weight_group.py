"""A group in which one process sends weights to all servers at once, one bucket of bytes after the other.

The store has the key ``layout``, with name, type and shape of each tensor in order, and at the end ``received/RANK``.
It imports nothing of this package, which vLLM's Python does not have.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BUCKET = 2**27
"""Bytes that are sent at a time: what every process holds beside its model (vLLM also three copies of a matrix)."""
BYTE = torch.uint8
WAIT = timedelta(seconds=300)
"""How long a process waits for another one, which gathers a bucket or loads one meanwhile."""
_CONNECT = timedelta(seconds=10)
_MAIN_MEMORY = torch.device("cpu")


class GroupFailed(RuntimeError):
    """Weights were not sent to all of a group: what a receiver has loaded is no version."""


class WeightGroup(ABC):
    """This process in a group for one update: the first one sends, all others receive.

    Attributes:
        store: Where the processes leave each other notes.
        size: Number of processes.
        rank: Number of this one.
        bucket: What it sends from, or receives to: uint8 of shape [:data:`BUCKET`].
    """

    def __init__(self, store: Any, size: int, rank: int, device: torch.device) -> None:
        self.store = store
        self.size = size
        self.rank = rank
        self.bucket = torch.empty(BUCKET, dtype=BYTE, device=device)

    @abstractmethod
    def exchange(self, count: int) -> None:
        """Send so many bytes of the bucket, or receive them."""

    def release(self) -> None:  # noqa: B027 - a broadcast knows by itself
        """Tell the sender that the bucket's bytes were copied, where it does not know."""

    def leave(self) -> None:
        """Give the bucket back, and end connections, for which others wait; whatever holds on to this object."""
        vars(self).clear()

    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return type and shape of each tensor that is going to be received, in their order."""
        entries = json.loads(self.store.get("layout"))
        return {name: (getattr(torch, dtype), tuple(shape)) for name, dtype, shape in entries}

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, each in memory of its own, on the bucket's device."""
        layout = self.layout()
        left = sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())
        content = self.bucket[:0]
        for name, (dtype, shape) in layout.items():
            tensor = torch.empty(shape, dtype=dtype, device=self.bucket.device)
            empty = tensor.reshape(-1).view(BYTE)
            while len(empty):
                if not len(content):
                    content = self.bucket[:left]
                    self.exchange(len(content))
                    left -= len(content)
                part, content = content[: len(empty)], content[len(empty) :]
                empty[: len(part)].copy_(part)
                empty = empty[len(part) :]
                if not len(content):
                    self.release()
            if not left and not len(content):
                self.store.set(f"received/{self.rank}", "")
            yield name, tensor


class BroadcastGroup(WeightGroup):
    """A process group of torch's, by gloo or NCCL, beside those that the process has."""

    def __init__(self, store: Any, size: int, rank: int, device: torch.device, address: str) -> None:
        """Join it; gloo listens on an address of this machine."""
        super().__init__(store, size, rank, device)
        library: Any = dist
        if device == _MAIN_MEMORY:
            options, kind = library.ProcessGroupGloo._Options(), library.ProcessGroupGloo
            # Its own choice of an interface follows the name of the machine.
            options._devices = [kind.create_device(hostname=address)]
        else:
            # By default a time-out ends the process, which is the trainer's, too.
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
            options, kind = library.ProcessGroupNCCL.Options(), library.ProcessGroupNCCL
        options._timeout = WAIT
        self._processes = kind(store, rank, size, options)
        self._from_first = library.BroadcastOptions()
        self._from_first.rootRank, self._from_first.rootTensor = 0, 0

    def exchange(self, count: int) -> None:
        """Broadcast bytes; see :meth:`WeightGroup.exchange`."""
        self._processes.broadcast([self.bucket[:count]], self._from_first).wait()


class SharedGroup(WeightGroup):
    """Processes of one machine with one bucket: in memory of a GPU by CUDA IPC, else in main memory."""

    def __init__(self, store: Any, size: int, rank: int, device: torch.device, stack: contextlib.ExitStack) -> None:
        """Share a bucket, or open that of the first process; ``stack`` removes its file."""
        super().__init__(store, size, rank, device)
        self._number = 0
        if rank == 0:
            self._share(stack)
            return
        shared = json.loads(store.get("bucket"))
        if "file" in shared:
            self.bucket = torch.from_file(shared["file"], shared=True, size=BUCKET, dtype=BYTE)
        elif shared["gpu"] != self._gpu():
            raise GroupFailed(
                f"the trainer sends from the GPU {shared['gpu']}, this server computes on {self._gpu()}: set "
                "weight_transport to nccl, gloo or shared_memory"
            )
        else:
            handle = [bytes.fromhex(value["hex"]) if isinstance(value, dict) else value for value in shared["handle"]]
            storage = torch.UntypedStorage._new_shared_cuda(self.bucket.device.index, *handle[1:])
            self.bucket = self.bucket.new_empty(0).set_(storage)

    def _share(self, stack: contextlib.ExitStack) -> None:
        if self.bucket.device == _MAIN_MEMORY:
            path = Path("/dev/shm", f"turnwise-bucket-{os.getpid()}-{os.urandom(4).hex()}")
            stack.callback(path.unlink, missing_ok=True)
            self.bucket = torch.from_file(str(path), shared=True, size=BUCKET, dtype=BYTE)
            shared: dict[str, Any] = {"file": str(path)}
        else:
            values = self.bucket.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            handle = [{"hex": value.hex()} if isinstance(value, bytes) else value for value in values]
            shared = {"gpu": self._gpu(), "handle": handle}
        self.store.set("bucket", json.dumps(shared))

    def exchange(self, count: int) -> None:
        """Wait for the other side; see :meth:`WeightGroup.exchange`."""
        del count
        self._number += 1
        if self.rank:
            self.store.wait([f"sent/{self._number}"], WAIT)
            return
        self._synchronize()
        self.store.set(f"sent/{self._number}", "")
        self.store.wait([f"read/{self._number}/{rank}" for rank in range(1, self.size)], WAIT)

    def release(self) -> None:
        """Tell the sender; see :meth:`WeightGroup.release`."""
        self._synchronize()
        self.store.set(f"read/{self._number}/{self.rank}", "")

    def _synchronize(self) -> None:
        if self.bucket.device != _MAIN_MEMORY:
            torch.accelerator.synchronize()

    def _gpu(self) -> str:
        return str(torch.cuda.get_device_properties(self.bucket.device).uuid)


@contextlib.contextmanager
def joined(backend: str, host: str, port: int, size: int, rank: int, device: torch.device) -> Iterator[WeightGroup]:
    """Wrap one update: join its group, and leave it.

    Args:
        backend: ``gloo``, ``nccl`` or ``ipc``.
        host: Address of the store where the processes meet.
        port: Its port.
        size: Number of processes.
        rank: Number of this one; 0 sends.
        device: Where the model is; with gloo the bucket is in main memory.

    Raises:
        GroupFailed: A process left, or was not there in time.
    """
    with contextlib.ExitStack() as stack:
        try:
            with socket.create_connection((host, port), _CONNECT.total_seconds()) as probe:
                address = probe.getsockname()[0]
            library: Any = dist
            # One that was closed, because another process failed, is not waited for.
            store = library.TCPStore(host, port, size, False, _CONNECT, wait_for_workers=False)
            store.set_timeout(WAIT)
            group: WeightGroup
            if backend == "ipc":
                group = SharedGroup(store, size, rank, device, stack)
            else:
                where = _MAIN_MEMORY if backend == "gloo" else device
                group = BroadcastGroup(store, size, rank, where, address)
            stack.callback(group.leave)
            yield group
        except (OSError, RuntimeError) as error:
            if isinstance(error, GroupFailed):
                raise
            raise GroupFailed(
                f"weights by {backend} in the group of {size} at {host}:{port} failed in process {rank}: {error}: see "
                f"the logs of servers and ranks for one that ended or stands still (each waits {WAIT.seconds} s), and "
                "that each reaches this address; or set weight_transport to shared_memory"
            ) from error
