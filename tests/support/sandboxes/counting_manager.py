"""A sandbox manager that counts what it opens."""

from __future__ import annotations

from turnwise.sandboxes import Sandbox, SandboxManager, SandboxSpec


class CountingManager(SandboxManager):
    """Counts the sandboxes that it opened, in ``opened``."""

    opened = 0

    async def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        self.opened += 1
        return await super().open(spec)
