"""The servers of a run, as one: launched together, one client over all, a dead one started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from turnwise.errors import EngineDied, InferenceError, RequestRefused
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig

T = TypeVar("T")

_log = logging.getLogger(__name__)
_COUNTERS = ("requests", "prefilled_tokens", "reused_tokens", "generated_tokens", "preemptions", "cpu_seconds")


class ReplicaSet:
    """Built-in servers of one model.

    Attributes:
        replicas: The servers.
        restarts: How many times a dead one was started again.
    """

    def __init__(self, config: InferenceConfig, model: Path, *, logs: Path) -> None:
        """Describe the servers; :meth:`launch` starts them.

        Args:
            config: How many and how.
            model: Directory of the checkpoint that they start from.
            logs: Directory of their log files.
        """
        self.replicas = [
            BuiltinReplica(model, config, log_file=logs / f"server-{number}.log") for number in range(config.replicas)
        ]
        self.restarts = 0
        self._config = config
        self._client: HTTPClient | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._fatal: InferenceError | None = None
        # Servers whose end was noticed and that are not back yet.
        self._down: set[BuiltinReplica] = set()
        self._whole = asyncio.Event()
        self._whole.set()
        # Set at the next death, and then replaced: one that is over at once is seen by who looked before.
        self._next_death = asyncio.Event()

    @property
    def client(self) -> HTTPClient:
        """One client over all servers; valid after :meth:`launch`."""
        if self._client is None:
            raise InferenceError("the servers were not launched")
        return self._client

    async def launch(self) -> None:
        """Start all servers and wait until they answer.

        Raises:
            InferenceError: One of them did not start; the others are ended.
        """
        try:
            async with asyncio.TaskGroup() as starting:
                for replica in self.replicas:
                    starting.create_task(replica.launch())
        except ExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from errors
        urls = [replica.url for replica in self.replicas]
        self._client = HTTPClient(urls, retries=self._config.retries, retry_wait=self._config.retry_wait)
        self._watchers = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def recover(self, error: InferenceError) -> None:
        """Wait until all servers run, after a request failed.

        Args:
            error: Why it failed.

        Raises:
            InferenceError: A server died more often than ``max_restarts`` allows, or could not be started again.
        """
        while True:
            await self._whole.wait()
            if self._fatal is not None:
                raise self._fatal
            death = self._next_death
            silent = [replica for replica in self.replicas if not await replica.health()]
            if self._down or death.is_set():
                continue
            if not silent:
                return
            # The end of a process is noticed by a thread: it may be a moment behind the broken connection.
            try:
                await asyncio.wait_for(death.wait(), self._config.close_timeout)
            except TimeoutError:
                raise InferenceError(f"{silent[0].url} runs, but does not answer: {error}") from error

    async def through_deaths(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await a call that needs all servers; where it fails, once more when they run again.

        It is tried again as often as servers may die, at least once: the notice of a death may come after the failure.

        Raises:
            RequestRefused: A server refuses what it is asked.
            InferenceError: A server died more often than ``max_restarts`` allows, or the call failed too often.
        """
        left = max(1, self._config.max_restarts * len(self.replicas))
        while True:
            try:
                return await call()
            except RequestRefused:
                raise
            except InferenceError as error:
                await self.recover(error)
                if left == 0:
                    raise
                left -= 1

    async def pause(self) -> None:
        """Have all servers answer what they are sampling with what there is, and sample nothing until :meth:`resume`.

        Raises:
            InferenceError: A server does not answer.
        """
        await asyncio.gather(*(replica.pause(abort=True) for replica in self.replicas))

    async def resume(self) -> None:
        """Have all servers sample again.

        Raises:
            InferenceError: A server does not answer.
        """
        await asyncio.gather(*(replica.resume() for replica in self.replicas))

    async def stats(self) -> dict[str, float]:
        """Return the servers' counters, summed, and ``restarts``; what a server that died had counted is gone.

        Raises:
            InferenceError: A server does not answer.
        """
        total: dict[str, float] = {"restarts": float(self.restarts)}
        for replica in self.replicas:
            stats = await replica.stats()
            for name in _COUNTERS:
                total[name] = total.get(name, 0.0) + float(stats[name])
        return total

    async def close(self) -> None:
        """End all servers and the client. Closing twice is no error."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []
        if self._client is not None:
            await self._client.close()
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def _watch(self, replica: BuiltinReplica) -> None:
        restarts: list[float] = []
        while True:
            death = await replica.wait_died()
            self._note_death(replica)
            try:
                await self._bring_back(replica, death, restarts)
            except EngineDied as error:
                self._fatal = error
                return
            finally:
                self._down.discard(replica)
                if not self._down:
                    self._whole.set()

    async def _bring_back(self, replica: BuiltinReplica, death: EngineDied, restarts: list[float]) -> None:
        """Start a server again, one that does not start too, as often as may be; ``restarts`` are the times of it."""
        loop, allowed, window = asyncio.get_running_loop(), self._config.max_restarts, self._config.restart_window
        before, failed = replica.url, None
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
            if replica.url != before:
                self.client.replace_url(before, replica.url)
            return

    def _note_death(self, replica: BuiltinReplica) -> None:
        self._down.add(replica)
        self._whole.clear()
        noticed, self._next_death = self._next_death, asyncio.Event()
        noticed.set()
