"""The start of a container, cancelled while the engine creates it. A fake stands for the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.sandboxes.core import SandboxSpec
from turnwise.sandboxes.docker.sandbox import DockerSandbox
from turnwise.sandboxes.docker.settings import DockerOptions


async def test_cancelled_start_removes_the_container_once_created() -> None:
    containers: set[str] = set()
    requested, release = asyncio.Event(), asyncio.Event()

    async def call(*_: Any, **__: Any) -> None:
        requested.set()
        # A request that runs in a thread continues when its caller is cancelled.
        await asyncio.shield(asyncio.ensure_future(create()))

    async def create() -> None:
        await release.wait()
        containers.add(sandbox.id)

    async def settings(*_: Any) -> dict[str, str]:
        return {"Image": "some"}

    async def remove(name: str) -> None:
        containers.discard(name)

    engine = SimpleNamespace(call=call)
    options = DockerOptions()
    pool: Any = SimpleNamespace(
        engine=engine, options=options, settings=settings, remove_container=remove, take_user=lambda *_: "1000:1000"
    )
    sandbox = DockerSandbox(SandboxSpec(), pool)
    starting = asyncio.create_task(sandbox.start())
    await requested.wait()
    starting.cancel()
    await asyncio.sleep(0.01)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert containers == set()
