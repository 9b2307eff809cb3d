"""Weight transports without a file: the process that has the weights sends them to all servers in one group.

The process that runs the loop only announces an update: it holds the store where the group meets, and none of the
bytes. Adapters are small, and go by a file.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

import torch.distributed as dist

from turnwise.engine.accelerator import accelerator, collectives, resolve_device
from turnwise.engine.vllm_side.turnwise_weight_group import BUCKET, BYTE, WAIT, GroupFailed, WeightGroup, joined
from turnwise.engine.weights import WeightStream, WeightTensors, tensor_entries, weight_stream
from turnwise.errors import ConfigError, InferenceError
from turnwise.inference.guard.turnwise_guard import is_loopback
from turnwise.model.core import AdapterInfo, GroupAddress, Replica, WeightManifest
from turnwise.placement.devices import AUTO, CPU
from turnwise.placement.local import current_placement
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.train_thread import uninterrupted
from turnwise.trainer.weight_sync import SendWeights, SharedMemoryTransport, check_versions

_KEY = "policies.main.weight_transport.name"


def send_version(tensors: WeightTensors, *, address: GroupAddress, version: int) -> WeightManifest:
    """Send weights to a group, whose first process this is. Raises InferenceError where a process of it fails."""
    stream = weight_stream(tensors, version)
    try:
        with joined(**asdict(address), device=resolve_device(AUTO)) as group:
            send_tensors(group, stream)
    except GroupFailed as error:
        raise InferenceError(f"weights version {version}: {error}") from error
    return WeightManifest(version, "", tensor_entries(stream.described), group=address)


def send_tensors(group: WeightGroup, stream: WeightStream) -> None:
    """Send tensors to the other processes of a group, in the order of their description."""
    layout = [(name, str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in stream.described.items()]
    group.store.set("layout", json.dumps(layout))
    filled, room = 0, len(group.bucket)
    for (expected, _, _), (name, tensor) in zip(layout, stream, strict=True):
        if name != expected:
            raise GroupFailed(f"{name} was made where {expected} was announced")
        content = tensor.detach().contiguous().reshape(-1).view(BYTE)
        while len(content):
            part, content = content[: room - filled], content[room - filled :]
            group.bucket[filled : filled + len(part)].copy_(part)
            filled += len(part)
            if filled == room:
                group.exchange(filled)
                filled = 0
    if filled:
        group.exchange(filled)
    # Memory that others still read from may be this process's.
    group.store.wait([f"received/{rank}" for rank in range(1, group.size)], WAIT)


def open_store(host: str, size: int) -> Any:
    """Return a store where a group of a size meets, on this address and no other; it closes when it is deleted."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port, library = listener.getsockname()[1], cast("Any", dist)
    return library.TCPStore(host, port, size, True, WAIT, wait_for_workers=False, master_listen_fd=listener.detach())


class CollectiveTransport(SharedMemoryTransport):
    """Broadcasts each version, bucket by bucket, to all servers at once, which load it while it arrives.

    A server that is restarted has lost its weights, which are in no file: it stays paused until the next update.

    Attributes:
        backend: What moves the bytes.
    """

    backend: ClassVar[str]

    def check(self, config: TrainConfig, replicas: Sequence[Replica]) -> None:
        """Check that the servers can join a group, and that the backend reaches them. Raises ConfigError."""
        problem, unable = "", [replica.url for replica in replicas if not replica.group_ranks]
        devices = (accelerator() or CPU, config.policy.model.device, config.inference.device)
        on_cpu = collectives(devices[0]) != "nccl" or CPU in devices
        remote = [host for host in _hosts(replicas) if not is_loopback(host)]
        if unable:
            problem = f"but the server at {unable[0]} (inference.engine) cannot join a group: set it to shared_memory"
        elif self.backend == "nccl" and on_cpu:
            problem = "but trainer or servers compute on CPUs (model.device, inference.device): set it to gloo"
        elif self.backend == "ipc" and (remote or current_placement().ranks is not None):
            problem = f"but {(*remote, 'a rank')[0]} is on another machine (placement, inference.url): set it to gloo"
        if problem:
            raise ConfigError(f"{_KEY} is {self.backend}, {problem}")

    async def publish(
        self, send: SendWeights, replicas: Sequence[Replica], version: int, *, adapter: AdapterInfo | None = None
    ) -> WeightManifest:
        """Send the weights while every replica loads them; see :meth:`SharedMemoryTransport.publish`."""
        if adapter is not None:
            return await super().publish(send, replicas, version, adapter=adapter)
        manifest = await uninterrupted(self._exchange(send, replicas, version))
        self.sent_bytes += manifest.nbytes
        return manifest

    async def _exchange(self, send: SendWeights, replicas: Sequence[Replica], version: int) -> WeightManifest:
        host = _meeting_host(replicas)
        size = 1 + sum(replica.group_ranks for replica in replicas)
        store = open_store(host, size)
        group = GroupAddress(self.backend, host, store.port, size)
        sending = asyncio.create_task(asyncio.to_thread(send, partial(send_version, address=group, version=version)))
        updates, rank = list[asyncio.Task[int]](), 1
        for replica in replicas:
            manifest = WeightManifest(version, "", group=replace(group, rank=rank))
            updates.append(asyncio.create_task(replica.update_weights(manifest)))
            rank += replica.group_ranks
        tasks: list[asyncio.Task[Any]] = [*updates, sending]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        # Who waits for a process that failed, and will not come, waits at the store.
        del store
        await asyncio.wait(tasks)
        # The first one is the cause of the others.
        errors = [task.exception() for task in (*done, *tasks)]
        if error := next(filter(None, errors), None):
            raise error
        check_versions(version, replicas, [update.result() for update in updates])
        return sending.result()


def _meeting_host(replicas: Sequence[Replica]) -> str:
    """Return the address of this machine that ranks and servers reach."""
    if (ranks := current_placement().ranks) is not None:
        return ranks.host
    hosts = _hosts(replicas)
    remote = next((host for host in hosts if not is_loopback(host)), hosts[0])
    family, _, _, _, address = socket.getaddrinfo(remote, 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the system only chooses a route.
        probe.connect(address)
        return str(probe.getsockname()[0])


def _hosts(replicas: Sequence[Replica]) -> list[str]:
    return [urlsplit(replica.url).hostname or "" for replica in replicas]


class GlooTransport(CollectiveTransport):
    """Broadcasts over TCP, from main memory to main memory."""

    backend = "gloo"


class NCCLTransport(CollectiveTransport):
    """Broadcasts from GPU to GPU."""

    backend = "nccl"
    device_bytes = BUCKET


class IPCTransport(CollectiveTransport):
    """Hands buckets over in memory that processes of one machine share: of one GPU, or main memory."""

    backend = "ipc"
    device_bytes = BUCKET
