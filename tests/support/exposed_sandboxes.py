"""Sandboxes each of which is let reach a session of a gateway, as those are in which programs run."""

from __future__ import annotations

from typing import Any, ClassVar

from support.chat_models import renderer_for
from turnwise.gateway.local import LocalGateway, SessionEndpoint
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.sandboxes.core import Sandbox, SandboxBackend, SandboxSpec
from turnwise.sandboxes.docker import DockerBackend
from turnwise.sandboxes.local import LocalBackend
from turnwise.types import SamplingParams


class _Opening(SandboxBackend):
    """As above.

    Attributes:
        opened: How many sandboxes have a way out, of all of one kind in this process.
        endpoint: The session that it reaches, once opened.
    """

    opened: ClassVar[int] = 0

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.endpoint: SessionEndpoint | None = None
        self._gateway = LocalGateway(renderer_for("qwen3"), context_length=4000)

    def make(self, spec: SandboxSpec) -> Sandbox:
        sandbox = super().make(spec)
        start = sandbox.start

        async def start_and_open() -> None:
            await start()
            await self._open(sandbox)

        sandbox.start = start_and_open  # type: ignore[method-assign]
        return sandbox

    async def close(self) -> None:
        if self.endpoint is not None:
            # Whatever was tried inside, the model was not asked, and nobody said what the episode is worth.
            assert (self.endpoint.entry.session.turns, self.endpoint.entry.rewards) == (0, [])
            await self._gateway.shut(self.endpoint)
        await self._gateway.close()
        await super().close()

    async def _open(self, sandbox: Sandbox) -> None:
        if self.endpoint is None:
            renderer = renderer_for("qwen3")
            client = ScriptedClient(renderer, lambda _: "Yes.")
            limits = SessionLimits(context_length=4000)
            session = Session(client, renderer, id="attacked", limits=limits, params=SamplingParams())
            self.endpoint = await self._gateway.open(session)
        await self.endpoint.serve_at(await sandbox.listen())
        type(self).opened += 1


class ExposedLocal(_Opening, LocalBackend):
    """Local ones."""


class OpenContainers(_Opening, DockerBackend):
    """Docker's."""
