"""The sandboxes of one process: bounded and retried starts, prewarming, and cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Final

from turnwise.errors import SandboxError, SandboxStartError
from turnwise.sandboxes.config import SandboxConfig, open_backend
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxBackend, SandboxSpec

_START_RETRIES: Final = 2
"""How often a start that failed is tried again."""
_BACKOFF: Final = 0.1
"""Seconds before a start is tried again, doubled each time, and spread by half."""


class SandboxManager:
    """Opens and closes the sandboxes of one configuration, lazily; ``backend`` replaces the configured one."""

    def __init__(self, config: SandboxConfig | None = None, backend: SandboxBackend | None = None) -> None:
        self.config = config or SandboxConfig()
        self._backend = backend
        self._probed: Capabilities | None = None
        self._probing = asyncio.Lock()
        self._starts = asyncio.Semaphore(self.config.max_starts)
        self._open: dict[str, Sandbox] = {}
        self._warm: list[Sandbox] = []
        self._starting: dict[asyncio.Task[None], SandboxSpec] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._latest_spec: SandboxSpec | None = None
        self._closed = False

    @property
    def backend(self) -> SandboxBackend:
        """The backend, created on first access. Raises ConfigError."""
        if self._backend is None:
            self._backend = open_backend(self.config)
        return self._backend

    async def probe(self) -> Capabilities:
        """Reap leftovers of dead hosts and return the backend's capabilities. Raises SandboxUnavailable."""
        async with self._probing:
            if self._probed is None:
                self._probed = await self.backend.probe()
                await self.backend.reap()
        return self._probed

    async def check(self) -> None:
        """Create and probe an explicitly configured backend. Raises ConfigError or SandboxUnavailable."""
        if self.config != SandboxConfig():
            await self.probe()

    async def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Return a started sandbox, a prewarmed one if its spec is the same; configured limits override the spec's.

        Raises SandboxUnavailable, or SandboxStartError after all retries.
        """
        await self.probe()
        spec = self.config.apply(spec or SandboxSpec())
        warm = next((candidate for candidate in self._warm if candidate.spec == spec), None)
        if warm is not None:
            self._warm.remove(warm)
        sandbox = warm or await self._start(spec)
        if self._closed:
            await sandbox.close()
            raise SandboxStartError("the sandbox manager was closed while the sandbox started")
        self._open[sandbox.id] = sandbox
        self._latest_spec = spec
        self._prewarm()
        return sandbox

    async def fork(self, sandbox: Sandbox, count: int = 1) -> list[Sandbox]:
        """Return forks of a sandbox, all of one freeze; the manager closes them.

        Raises:
            SandboxUnavailable: The backend cannot fork.
            SandboxStartError: A fork did not start, or the manager was closed meanwhile.
        """
        forks = list(await sandbox.fork(count))
        if self._closed:
            await asyncio.gather(*(fork.close() for fork in forks))
            raise SandboxStartError("the sandbox manager was closed while the sandbox started")
        self._open |= {fork.id: fork for fork in forks}
        return forks

    async def release(self, sandbox: Sandbox) -> None:
        """Close a sandbox, which is never reused. If cancelled, closing continues in the background."""
        self._open.pop(sandbox.id, None)
        await asyncio.shield(self._close_soon(sandbox))

    async def close(self) -> None:
        """Close all sandboxes and the backend; idempotent."""
        self._closed, self._latest_spec = True, None
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, *self._closing, return_exceptions=True)
        sandboxes = [*self._open.values(), *self._warm]
        self._open, self._warm = {}, []
        results = await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), return_exceptions=True)
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _start(self, spec: SandboxSpec) -> Sandbox:
        for attempt in range(_START_RETRIES + 1):
            sandbox = self.backend.make(spec)
            sandbox.start_slots = self._starts
            try:
                async with self._starts:
                    await sandbox.start()
            except SandboxError as error:
                with contextlib.suppress(SandboxError):
                    await sandbox.close()
                if not error.retryable or attempt == _START_RETRIES:
                    raise
                await asyncio.sleep(_BACKOFF * 2**attempt * random.uniform(0.75, 1.25))
            else:
                return sandbox
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _prewarm(self) -> None:
        """Prewarm sandboxes of the latest spec, and close those of other specs."""
        if self._closed:
            return
        for sandbox in [sandbox for sandbox in self._warm if sandbox.spec != self._latest_spec]:
            self._warm.remove(sandbox)
            self._close_soon(sandbox)
        latest = self._latest_spec
        coming = sum(spec == latest for spec in self._starting.values())
        for _ in range(self.config.prewarm - len(self._warm) - coming):
            if latest is not None:
                task = asyncio.create_task(self._start_ahead(latest))
                self._starting[task] = latest
                task.add_done_callback(lambda done: self._starting.pop(done, None))

    def _close_soon(self, sandbox: Sandbox) -> asyncio.Task[None]:
        task = asyncio.create_task(sandbox.close())
        self._closing.add(task)
        task.add_done_callback(self._forget_closed)
        return task

    def _forget_closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled():
            task.exception()  # the caller that awaits it gets it; one that is closed in the background has no caller

    async def _start_ahead(self, spec: SandboxSpec) -> None:
        # A failed prewarm is not reported: the next request starts a sandbox itself and gets the error.
        with contextlib.suppress(SandboxError):
            self._warm.append(await self._start(spec))
            self._prewarm()
