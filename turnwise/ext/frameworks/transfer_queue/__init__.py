"""Payloads of finished groups in a TransferQueue: a controller and storage processes, all actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from turnwise.columns import DTYPES, Columns
from turnwise.errors import TrainError, requires_extra
from turnwise.rollout.replay.group_store import PayloadsLost, PayloadStore, TransferQueueConfig

# By default it would use 8 threads, and on a machine of fewer cores say so at every call.
os.environ.setdefault("TQ_NUM_THREADS", "1")

with requires_extra("TransferQueue", "transfer-queue", "replay.backend 'transfer_queue'"):
    import ray
    import torch
    import transfer_queue
    from omegaconf import OmegaConf
    from tensordict import TensorDict

T = TypeVar("T")

_CONTROLLER, _NAMESPACE = "TransferQueueController", "transfer_queue"
# Ray sends no objects for us: its store has the least room that Ray takes.
_OBJECT_STORE_BYTES = 80 * 2**20
# Ray gives its processes 15 s to start, which on a busy machine may be too short.
_STARTS = 3
# A call that takes longer than this looks whether the processes still listen.
TIMEOUT_S = 60.0
"""Seconds after which a call without an answer counts as a lost store; also the wait for free CPUs."""
_LOOK_SECONDS = 1.0


class TransferQueuePayloads(PayloadStore):
    """Rows in a TransferQueue, in a partition of this run.

    A Ray cluster has one queue. Where none is there it is started, and ends with the run; one that is there is shared.

    Attributes:
        sent_bytes: Bytes of the columns that were stored.
        received_bytes: Bytes of the columns that were read.
    """

    def __init__(self, config: TransferQueueConfig) -> None:
        self._config = config
        self._partition = f"turnwise-{uuid4().hex[:12]}"
        # The loop of a thread that lives until the queue is closed. Ray's processes end with the thread that started
        # them, and each call of TransferQueue changes how many threads torch uses in its thread, which in the
        # trainer's is a setting.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owns_queue = False
        self._owns_ray = False
        self._listeners: list[tuple[str, int]] = []
        self.sent_bytes = 0
        self.received_bytes = 0

    async def start(self) -> None:
        """Connect to the cluster and its queue, or start them."""
        if self._loop is not None:
            return
        loop = asyncio.new_event_loop()
        threading.Thread(target=_serve, args=(loop,), name="turnwise-transfer-queue", daemon=True).start()
        try:
            await _run(loop, self._connect)
        except BaseException:  # raised again: only the thread is ended
            loop.call_soon_threadsafe(loop.stop)
            raise
        self._loop = loop

    async def put(self, rows: Mapping[str, Columns]) -> None:
        """Store rows."""
        await self._reach(self._put(rows))
        self.sent_bytes += sum(column.nbytes for row in rows.values() for column in row.values())

    async def get(self, keys: Sequence[str], columns: Sequence[str]) -> list[Columns]:
        """Return columns of rows."""
        rows = await self._reach(self._get(list(keys), list(columns)))
        self.received_bytes += sum(column.nbytes for row in rows for column in row.values())
        return rows

    async def clear(self, keys: Collection[str]) -> None:
        """Forget rows."""
        await self._reach(transfer_queue.async_kv_clear(list(keys), self._partition))

    async def _put(self, rows: Mapping[str, Columns]) -> None:
        columns = {
            name: torch.nested.as_nested_tensor(
                [torch.from_numpy(row[name]) for row in rows.values()], layout=torch.jagged
            )
            for name in DTYPES
        }
        data = TensorDict(columns, batch_size=[len(rows)])
        await transfer_queue.async_kv_batch_put(list(rows), self._partition, fields=data)

    async def _get(self, keys: list[str], columns: list[str]) -> list[Columns]:
        data = await transfer_queue.async_kv_batch_get(keys, self._partition, columns)
        rows: list[Columns] = [{} for _ in keys]
        for name in columns:
            for row, tensor in zip(rows, data[name].unbind(), strict=True):
                row[name] = tensor.numpy()
        return rows

    async def close(self) -> None:
        """End the queue and the cluster that this run started; else forget its rows."""
        if self._loop is None:
            return
        if not self._owns_queue:
            with contextlib.suppress(PayloadsLost):
                await self._reach(transfer_queue.get_client().async_clear_partition(self._partition))
        loop, self._loop = self._loop, None
        try:
            await _run(loop, self._disconnect)
        finally:
            loop.call_soon_threadsafe(loop.stop)

    def _connect(self) -> None:
        if not ray.is_initialized():
            address = self._config.address or os.environ.get("RAY_ADDRESS") or "local"
            # Ray starts its workers at niceness 15: on a busy machine a train step would wait for them.
            os.environ.setdefault("RAY_worker_niceness", "0")
            _start_ray(address, self._config.units + 1)
            self._owns_ray = True
        try:
            ray.get_actor(_CONTROLLER, namespace=_NAMESPACE)
            self._owns_queue = False
        except ValueError:
            self._owns_queue = True
            self._await_cpus()
        settings = {"backend": {"SimpleStorage": {"num_data_storage_units": self._config.units}}}
        try:
            started = transfer_queue.init(OmegaConf.create(settings))
        except Exception as error:  # TransferQueue's and Ray's: the queue does not start, in their own words
            raise TrainError(f"TransferQueue does not start: {type(error).__name__}: {error}") from error
        if self._owns_queue:
            units = list(started.backend.SimpleStorage.zmq_info.values())
            self._listeners = [
                (started.controller.zmq_info.ip, started.controller.zmq_info.ports["request_handle_socket"])
            ]
            self._listeners += [(unit.ip, unit.ports["put_get_socket"]) for unit in units]

    def _await_cpus(self) -> None:
        """Wait until the cluster has room: actors without it would wait without a word."""
        needed, until = self._config.units + 1, time.monotonic() + TIMEOUT_S
        while (free := ray.available_resources().get("CPU", 0)) < needed:
            total = ray.cluster_resources().get("CPU", 0)
            if total < needed or time.monotonic() > until:
                raise TrainError(
                    f"replay.transfer_queue.units is {self._config.units}, which needs {needed} CPUs of the Ray "
                    f"cluster; {free:g} of its {total:g} are free: lower it, or add nodes"
                )
            time.sleep(0.2)

    def _disconnect(self) -> None:
        if self._owns_queue:
            transfer_queue.close()
        if self._owns_ray:
            ray.shutdown()

    async def _reach(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of the queue; its own time-out of minutes is not waited for where a process is gone."""
        if self._loop is None:
            call.close()
            raise TrainError("TransferQueue is not started: enter the replay buffer first (async with buffer)")
        task = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
        until = time.monotonic() + TIMEOUT_S
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK_SECONDS)
                if not task.done():
                    await self._look(late=time.monotonic() > until)
            return task.result()
        except PayloadsLost:
            raise
        except Exception as error:  # TransferQueue's, Ray's and ZeroMQ's: whatever it is, the rows cannot be had
            raise _lost(f"failed: {type(error).__name__}: {error}") from error
        finally:
            task.cancel()

    async def _look(self, *, late: bool) -> None:
        for host, port in self._listeners:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    _, writer = await asyncio.open_connection(host, port)
            except OSError as error:
                raise _lost(f"lost its process at {host}:{port}") from error
            writer.close()
        if late:
            raise _lost(f"gave no answer within {TIMEOUT_S:g} s")


def _lost(what: str) -> PayloadsLost:
    return PayloadsLost(f"TransferQueue {what}: resume the run with the same command; its journal has the groups")


def _start_ray(address: str, cpus: int) -> None:
    local = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR", **(local if address == "local" else {}))
        except Exception as error:  # Ray's: a cluster that does not start or answer, in its own words
            ray.shutdown()
            if address != "local" or attempt == _STARTS:
                raise TrainError(
                    f"replay.transfer_queue.address is {address!r}: Ray cannot be had there: {error}"
                ) from error
        else:
            return


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _run(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """Run blocking code in the thread of another event loop."""

    async def acting() -> None:
        act()

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(acting(), loop))
