"""The sandboxes of an environment's episode.

Owns: :class:`Sandboxed`, the part of an environment that opens and closes them. Refuses: what a sandbox is and how many
there may be (``turnwise/sandboxes``).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from turnwise.sandboxes.core import Mount, Sandbox, SandboxSpec
from turnwise.sandboxes.manager import SandboxManager


class Sandboxed:
    """What may open sandboxes, each for the length of one episode.

    Attributes:
        sandboxes: Where they come from; the runner sets it, with what ``rollout.sandbox`` says. None: the first that is
            opened makes a manager with the defaults, which is closed with the environment.
        sandbox: The first that was opened in this episode: where the episode's tools and programs run.
        guest_mounts: What of the host that one shows besides what the environment asks for: the program of an agent
            that runs there. The runner sets it before a reset.
    """

    sandboxes: SandboxManager | None = None
    sandbox: Sandbox | None = None
    guest_mounts: tuple[Mount, ...] = ()

    _own_manager: SandboxManager | None = None
    _in_use: tuple[tuple[SandboxManager, Sandbox], ...] = ()

    async def open_sandbox(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Return a started sandbox of this episode; it is closed with the environment, and by the next reset.

        Args:
            spec: What it is asked for; ``rollout.sandbox.limits`` goes before its limits.

        Raises:
            SandboxError: It cannot be had, or did not start.
        """
        manager = self.sandboxes or self._own_manager
        if manager is None:
            manager = self._own_manager = SandboxManager()
        if self.sandbox is None and self.guest_mounts:
            spec = spec or SandboxSpec()
            spec = replace(
                spec, mounts=(*spec.mounts, *(each for each in self.guest_mounts if each not in spec.mounts))
            )
        opened = await manager.open(spec)
        self._keep(manager, opened)
        return opened

    async def fork_sandbox(self, sandbox: Sandbox) -> Sandbox:
        """Return a started sandbox of this episode with the files of another of its sandboxes.

        Raises:
            SandboxError: The backend cannot, or it did not start.
        """
        manager = next(manager for manager, each in self._in_use if each is sandbox)
        opened = await manager.fork(sandbox)
        self._keep(manager, opened)
        return opened

    async def close_sandbox(self, sandbox: Sandbox) -> None:
        """Close a sandbox of this episode before its end."""
        for manager, each in self._in_use:
            if each is sandbox:
                self._in_use = tuple(held for held in self._in_use if held[1] is not sandbox)
                await manager.release(sandbox)
        if self.sandbox is sandbox:
            self.sandbox = None

    async def close_sandboxes(self, *, last: bool = False) -> None:
        """Close the sandboxes of the episode. Runs by itself, before a reset and after ``close``.

        Args:
            last: Whether no episode follows: a manager of its own is closed, too.
        """
        in_use, self._in_use, self.sandbox = self._in_use, (), None
        closing = [manager.release(sandbox) for manager, sandbox in in_use]
        results = await asyncio.gather(*closing, return_exceptions=True)
        if last and self._own_manager is not None:
            manager, self._own_manager = self._own_manager, None
            await manager.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _keep(self, manager: SandboxManager, sandbox: Sandbox) -> None:
        self._in_use = (*self._in_use, (manager, sandbox))
        if self.sandbox is None:
            self.sandbox = sandbox
