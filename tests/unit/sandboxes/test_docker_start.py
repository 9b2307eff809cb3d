"""The start of a container, cancelled while the engine makes it. A fake stands for the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.sandboxes.core import SandboxSpec
from turnwise.sandboxes.docker.engine import DockerOptions
from turnwise.sandboxes.docker.sandbox import DockerSandbox


async def test_a_container_that_is_being_made_is_removed_once_it_is_there() -> None:
    there: set[str] = set()
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def call(*_: Any, **__: Any) -> None:
        asked.set()
        # A request that runs in a thread goes on, whatever becomes of who asked for it.
        await asyncio.shield(asyncio.ensure_future(make()))

    async def make() -> None:
        await go_on.wait()
        there.add(sandbox.id)

    async def settings(*_: Any) -> dict[str, str]:
        return {"Image": "some"}

    async def remove(name: str) -> None:
        there.discard(name)

    engine = SimpleNamespace(call=call)
    options = DockerOptions.read({})
    keeper: Any = SimpleNamespace(engine=engine, options=options, settings=settings, remove_container=remove)
    sandbox = DockerSandbox(SandboxSpec(), keeper)
    starting = asyncio.create_task(sandbox.start())
    await asked.wait()
    starting.cancel()
    await asyncio.sleep(0.01)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert there == set()
