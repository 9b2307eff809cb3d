"""The inference servers of a run: launch, client over all of them, restart of dead ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from turnwise.chat.processor import load_processor
from turnwise.errors import EngineDied, InferenceError, RequestRefused, TurnwiseError
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.engines import check_engine, make_replicas
from turnwise.inference.routing import RoutingOptions
from turnwise.model.core import MemoryUse, Replica, ServedName, SleepMode, WeightManifest

T = TypeVar("T")

_log = logging.getLogger(__name__)
RESTART_WINDOW = 3600.0
"""Seconds after which a death no longer counts towards ``inference.max_restarts``."""
_NOTICED = 5.0
"""Seconds within which the death of a server is noticed after a connection to it broke."""
COUNTERS = (
    "requests", "prefilled_tokens", "reused_tokens", "generated_tokens", "truncated_tokens", "cut_mass", "preemptions",
    "cpu_seconds",
)  # fmt: skip
"""Counters of a server that are summed over all; an engine may lack some."""


def client_of(urls: Sequence[str], settings: InferenceConfig, model: Path, adapter: str | None = None) -> HTTPClient:
    """Return a client of running servers.

    Args:
        urls: Their base URLs.
        settings: Limits of requests.
        model: The model that they serve; only its media processor is read.
        adapter: Its name on servers of several policies; None on its own.
    """
    return HTTPClient(urls, model=adapter, routing=_routing(settings), processor=load_processor(model))


class ReplicaSet:
    """Servers of one model, of the configured engine.

    Attributes:
        restarts: Restarts so far.
        moved: Called with the old and the new URL of a server that was restarted, which may be the same.
        resend: Sends a restarted server its last weights, where it has lost them (:attr:`Replica.outdated`). It gets
            no requests before, by this or by an update of all.
    """

    def __init__(
        self,
        config: InferenceConfig,
        model: Path,
        *,
        logs: Path,
        adapters: Mapping[str, int] | None = None,
        sleeps: bool = False,
    ) -> None:
        """Configure the servers; :meth:`launch` starts them.

        Args:
            config: Engine, number of servers and their settings.
            model: Checkpoint directory.
            logs: Directory of their log files.
            adapters: Ranks of the adapters that each server holds, by name (:meth:`client_of`); None for the model
                alone.
            sleeps: Whether they are going to sleep.

        Raises:
            ConfigError: The engine is unknown.
        """
        self.replicas = make_replicas(model, config, logs=logs, adapters=adapters)
        for replica in self.replicas:
            replica.sleeps = sleeps
        self.restarts = 0
        self.moved: list[Callable[[str, str], Awaitable[None]]] = []
        self.resend: Callable[[Replica], Awaitable[None]] | None = None
        self._config = config
        self._model = model
        self._adapters = tuple(adapters or ())
        # Of the model, or of each adapter; empty until the launch.
        self._clients: dict[str | None, HTTPClient] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._fatal: InferenceError | None = None
        # Servers whose end was noticed and that are not back yet.
        self._down: set[Replica] = set()
        # The former URLs of restarted servers that get no requests yet.
        self._waiting: dict[Replica, str] = {}
        # Set while all servers run, and while one does.
        self._whole, self._some = asyncio.Event(), asyncio.Event()
        self._note_running()
        # Set at the next death and then replaced, so that a waiter also sees a death that was recovered from at once.
        self._next_death = asyncio.Event()

    @property
    def client(self) -> HTTPClient:
        """Client over all servers, of the model or of the first adapter; valid after :meth:`launch`."""
        return self.client_of(self._adapters[0] if self._adapters else None)

    def client_of(self, adapter: str | None) -> HTTPClient:
        """Return the client over all servers of an adapter, or of the model; valid after :meth:`launch`."""
        if adapter not in self._clients:
            raise InferenceError("the servers have not been launched")
        return self._clients[adapter]

    async def launch(self, *, updates: Sequence[WeightManifest] | None = None) -> None:
        """Start all servers and wait until they are ready.

        Args:
            updates: What updates of their weights will bring, for
                :meth:`~turnwise.model.core.Replica.prepare_updates`; None where there are none.

        Raises:
            ConfigError: The engine cannot be used as configured.
            InferenceError: A server fails; all are stopped.
        """
        await check_engine(self._model, self._config)
        try:
            async with asyncio.TaskGroup() as starting:
                for replica in self.replicas:
                    starting.create_task(_launch(replica, updates))
        except ExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from errors
        urls = [replica.url for replica in self.replicas]
        processor = await asyncio.to_thread(load_processor, self._model)
        self._clients = {
            name: HTTPClient(
                urls, names=partial(self._served_name, name), routing=_routing(self._config), processor=processor
            )
            for name in self._adapters or (None,)
        }
        self._watchers = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    def _served_name(self, adapter: str | None, url: str) -> ServedName:
        if adapter is None:
            return ServedName()
        replica = next((candidate for candidate in self.replicas if candidate.url == url), self.replicas[0])
        return replica.served_names.get(adapter, ServedName(adapter))

    @property
    def running(self) -> list[Replica]:
        """The servers that are not being restarted."""
        return [replica for replica in self.replicas if replica not in self._down]

    def _note_running(self) -> None:
        for event, complete in ((self._whole, not self._down), (self._some, bool(self.running))):
            event.set() if complete else event.clear()

    async def recover(self, error: InferenceError, *, partly: bool = False) -> None:
        """Wait until all servers run, or one does, after a request failed.

        Raises InferenceError if one exceeds ``max_restarts``.
        """
        while True:
            await (self._some if partly else self._whole).wait()
            if self._fatal is not None:
                raise self._fatal
            death = self._next_death
            silent = [replica for replica in self.running if not await replica.health()]
            if death.is_set() or (self._down and not partly):
                continue
            if not silent:
                return
            # The end of a process is noticed by a thread: it may be a moment behind the broken connection.
            try:
                await asyncio.wait_for(death.wait(), _NOTICED)
            except TimeoutError:
                raise InferenceError(f"{silent[0].url} is running but does not respond: {error}") from error

    async def with_recovery(self, call: Callable[[], Awaitable[T]], *, partly: bool = False) -> T:
        """Await a call that needs all servers, or ``partly`` those that run; retry it as often as servers may die.

        Raises RequestRefused, or InferenceError if a server exceeded ``max_restarts`` or the call failed too often.
        """
        attempts = max(1, self._config.max_restarts * len(self.replicas))
        while True:
            # One that starts takes part in nothing that all do together.
            await (self._some if partly else self._whole).wait()
            try:
                result = await call()
                await self._admit_current()
                return result
            except RequestRefused:
                raise
            except InferenceError as error:
                await self.recover(error, partly=partly)
                if attempts == 0:
                    raise
                attempts -= 1

    async def pause(self) -> None:
        """Finish all requests in flight with what they have, and pause sampling. Raises InferenceError."""
        await asyncio.gather(*(replica.pause(abort=True) for replica in self.running))

    async def resume(self) -> None:
        """Resume sampling on all servers. Raises InferenceError."""
        await asyncio.gather(*(replica.resume() for replica in self.running))

    async def sleep(self, *, keep_weights: bool) -> None:
        """Have all servers give back their memory; see :class:`turnwise.model.core.SleepMode`."""
        await asyncio.gather(*(mode.sleep(keep_weights=keep_weights) for mode in self._sleep_modes()))

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Wake a part of all servers; see :class:`turnwise.model.core.SleepMode`."""
        await asyncio.gather(*(mode.wake(part) for mode in self._sleep_modes()))

    def _sleep_modes(self) -> list[SleepMode]:
        return [replica.sleep_mode for replica in self.replicas if replica.sleep_mode is not None]

    async def stats(self) -> dict[str, float]:
        """Return ``restarts``, ``ejections``, ``resumed_tokens`` and the sums of the counters that the engine has.

        Those of a dead server are lost. Raises InferenceError.
        """
        counts = [client.router.counts for client in self._clients.values()]
        total = {
            "restarts": float(self.restarts),
            "ejections": float(sum(count.ejections for count in counts)),
            "resumed_tokens": float(sum(count.resumed_tokens for count in counts)),
        }
        for replica in self.running:
            stats = await replica.stats()
            for name in COUNTERS:
                if name in stats:
                    total[name] = total.get(name, 0.0) + float(stats[name])
        return total

    async def memory(self) -> list[MemoryUse | None]:
        """Return the memory of each server; None of one that does not respond."""

        async def of(replica: Replica) -> MemoryUse | None:
            try:
                return await replica.memory()
            except InferenceError:
                return None

        return list(await asyncio.gather(*(of(replica) for replica in self.replicas)))

    async def close(self) -> None:
        """Stop all servers and close the client; idempotent."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []
        for client in self._clients.values():
            await client.close()
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def _watch(self, replica: Replica) -> None:
        restarts: list[float] = []
        while True:
            death = await replica.wait_died()
            self._note_death(replica)
            try:
                await self._restart(replica, death, restarts)
            except EngineDied as error:
                self._fatal = error
                return
            finally:
                self._down.discard(replica)
                self._note_running()
            try:
                if replica.outdated and self.resend is not None:
                    await self.resend(replica)
                await self._admit_current()
            except EngineDied as error:
                self._fatal = error
                return
            except TurnwiseError as error:
                # Its death is noticed; that of the trainer ends the run.
                _log.error("the weights of a restarted server were not sent: %s", error)

    async def _admit_current(self) -> None:
        """Send restarted servers requests again that have the last weights."""
        for replica in [candidate for candidate in self._waiting if not candidate.outdated]:
            url = self._waiting.pop(replica)
            for tell in self.moved:
                await tell(url, replica.url)
            for client in self._clients.values():
                client.admit(replica.url)

    async def _restart(self, replica: Replica, death: EngineDied, restarts: list[float]) -> None:
        """Restart a server, within the limits; ``restarts`` are the times of its restarts."""
        loop, allowed, window = asyncio.get_running_loop(), self._config.max_restarts, RESTART_WINDOW
        url, failed = replica.url, None
        while True:
            restarts[:] = [time for time in restarts if loop.time() - time < window]
            if len(restarts) >= allowed:
                if failed is not None:
                    raise EngineDied(f"a server died and could not be started again: {failed}") from failed
                when = f" again after a restart, within {window:g} s" if allowed else ""
                raise EngineDied(f"a server died{when} (inference.max_restarts is {allowed}): {death}")
            restarts.append(loop.time())
            self.restarts += 1
            _log.error("restarting a server: %s", failed or death)
            try:
                await replica.restart()
            except InferenceError as error:
                failed = error
                continue
            # Updates that begin after it was admitted are sent to it.
            self._down.discard(replica)
            for client in self._clients.values():
                if replica.url != url:
                    client.replace_url(url, replica.url)
            self._waiting.setdefault(replica, url)
            if not replica.outdated:
                await self._admit_current()
            return

    def _note_death(self, replica: Replica) -> None:
        self._down.add(replica)
        self._note_running()
        for client in self._clients.values():
            client.eject(replica.url)
        noticed, self._next_death = self._next_death, asyncio.Event()
        noticed.set()


def _routing(config: InferenceConfig) -> RoutingOptions:
    limits = config.routing
    return RoutingOptions(
        max_requests=limits.max_requests, deadline=limits.deadline, routed_experts=config.routed_experts
    )


async def _launch(replica: Replica, updates: Sequence[WeightManifest] | None) -> None:
    await replica.launch()
    if updates is not None:
        await replica.prepare_updates(updates)
