"""The sandboxes that an environment opens for an episode."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from turnwise.sandboxes.core import Mount, Sandbox, SandboxSpec
from turnwise.sandboxes.manager import SandboxManager


class _SharedManager(SandboxManager):
    """A sandbox manager that environments without a runner make; closed by the last of those that share it."""

    users: int = 1


class SandboxOwner:
    """Base of objects that open sandboxes for the length of an episode.

    Attributes:
        sandboxes: The sandbox manager, set by the runner from ``rollout.sandbox``. None: the first use makes one with
            the defaults, closed with the environment.
        sandbox: The episode's first sandbox, where tools and programs run.
        guest_mounts: Mounts of that sandbox for an agent's program, set by the runner before a reset.
    """

    sandboxes: SandboxManager | None = None
    sandbox: Sandbox | None = None
    guest_mounts: tuple[Mount, ...] = ()

    _own_manager: _SharedManager | None = None
    _in_use: tuple[tuple[SandboxManager, Sandbox], ...] = ()

    async def open_sandbox(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Return a started sandbox, which is closed with the environment or by the next reset.

        Args:
            spec: The sandbox; ``rollout.sandbox.limits`` overrides its limits.

        Raises:
            SandboxError: It is unavailable, or did not start.
        """
        manager = self.sandboxes or self._own_manager
        if manager is None:
            manager = self._own_manager = _SharedManager()
        if self.sandbox is None and self.guest_mounts:
            spec = spec or SandboxSpec()
            spec = replace(
                spec, mounts=(*spec.mounts, *(mount for mount in self.guest_mounts if mount not in spec.mounts))
            )
        opened = await manager.open(spec)
        self._in_use = (*self._in_use, (manager, opened))
        if self.sandbox is None:
            self.sandbox = opened
        return opened

    async def close_sandbox(self, sandbox: Sandbox) -> None:
        """Close a sandbox before the end of the episode."""
        for manager, opened in self._in_use:
            if opened is sandbox:
                self._in_use = tuple(pair for pair in self._in_use if pair[1] is not sandbox)
                await manager.release(sandbox)
        if self.sandbox is sandbox:
            self.sandbox = None

    async def close_sandboxes(self, *, last: bool = False) -> None:
        """Close the sandboxes of the episode. Called before a reset and after ``close``.

        Args:
            last: Whether no episode follows: an own manager is closed, too.
        """
        in_use, self._in_use, self.sandbox = self._in_use, (), None
        closing = [manager.release(sandbox) for manager, sandbox in in_use]
        results = await asyncio.gather(*closing, return_exceptions=True)
        if last and self._own_manager is not None:
            manager, self._own_manager = self._own_manager, None
            manager.users -= 1
            if not manager.users:
                await manager.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result
