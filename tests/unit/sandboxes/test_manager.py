"""The sandbox manager: bounded and retried starts, prewarming, and that every sandbox is closed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from support.sandboxes.noted_backend import NotedBackend, until
from turnwise.config import load_config
from turnwise.envs import Env, close_env, reset_env
from turnwise.envs.wrappers import wrap
from turnwise.errors import ConfigError, EnvError, SandboxStartError, SandboxUnavailable
from turnwise.sandboxes import SandboxConfig, SandboxLimits, SandboxManager, SandboxSpec
from turnwise.sandboxes.config import open_backend


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.sandboxes.manager._BACKOFF", 0.0)


def open_manager(backend: NotedBackend, **config: object) -> SandboxManager:
    return SandboxManager(SandboxConfig.model_validate(config), backend)


async def test_failed_start_is_retried() -> None:
    backend = NotedBackend(failing={1, 2})
    sandbox_manager = open_manager(backend)
    sandbox = await sandbox_manager.open()
    assert (sandbox.id, backend.made) == ("noted-3", 3)
    await sandbox_manager.close()
    assert backend.alive == set()
    assert backend.closed


async def test_last_start_error_is_raised_and_unavailable_is_not_retried() -> None:
    backend = NotedBackend(failing={1, 2, 3, 4})
    sandbox_manager = open_manager(backend)
    with pytest.raises(SandboxStartError, match="did not start"):
        await sandbox_manager.open()
    assert backend.made == 3
    backend.error = SandboxUnavailable("no engine")
    with pytest.raises(SandboxUnavailable):
        await sandbox_manager.open()
    assert backend.made == 4


async def test_concurrent_starts_are_bounded() -> None:
    backend = NotedBackend()
    backend.gate = asyncio.Event()
    sandbox_manager = open_manager(backend, max_starts=3)
    opening = [asyncio.create_task(sandbox_manager.open()) for _ in range(10)]
    await until(lambda: backend.starting == 3, "three start")
    backend.gate.set()
    await asyncio.gather(*opening)
    assert backend.most_starting == 3
    assert len(backend.alive) == 10
    assert backend.reaped == 1, "what dead hosts left is removed once"
    await sandbox_manager.close()
    assert backend.alive == set()


async def test_prewarmed_sandboxes_follow_the_latest_spec() -> None:
    backend = NotedBackend()
    sandbox_manager = open_manager(backend, prewarm=2)
    await sandbox_manager.open()
    await until(lambda: len(backend.alive) == 3, "two ahead")
    prewarmed = await sandbox_manager.open()
    assert prewarmed.id in {"noted-2", "noted-3"}
    other = SandboxSpec(image="other")
    await sandbox_manager.open(other)
    await until(lambda: len(backend.alive) == 5 and len(sandbox_manager._warm) == 2, "two ahead of the other kind")
    prewarmed_ids = {sandbox.id for sandbox in sandbox_manager._warm}
    assert (await sandbox_manager.open(other)).id in prewarmed_ids
    await sandbox_manager.close()
    assert backend.alive == set()


async def test_close_ends_sandboxes_that_are_starting() -> None:
    backend = NotedBackend()
    backend.gate = asyncio.Event()
    sandbox_manager = open_manager(backend, prewarm=4)
    opening = asyncio.create_task(sandbox_manager.open())
    await until(lambda: backend.starting == 1, "one starts")
    closing = asyncio.create_task(sandbox_manager.close())
    await asyncio.sleep(0)
    backend.gate.set()
    await closing
    with pytest.raises(SandboxStartError, match="closed"):
        await opening
    assert backend.alive == set()


async def test_cancelled_release_continues_and_fork_after_close_is_closed() -> None:
    backend = NotedBackend()
    sandbox_manager = open_manager(backend)
    first, second = await sandbox_manager.open(), await sandbox_manager.open()
    close, release = first.close, asyncio.Event()

    async def slowly() -> None:
        await release.wait()
        await close()

    first.close = slowly  # type: ignore[method-assign]
    releasing = asyncio.create_task(sandbox_manager.release(first))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert first.id in backend.alive
    backend.gate = asyncio.Event()
    forking = asyncio.create_task(sandbox_manager.fork(second))
    await until(lambda: backend.starting == 1, "a fork starts")
    ending = asyncio.create_task(sandbox_manager.close())
    await asyncio.sleep(0)
    release.set()
    await ending
    assert first.id not in backend.alive
    backend.gate.set()
    with pytest.raises(SandboxStartError, match="closed"):
        await forking
    assert backend.alive == set()


async def test_configured_limits_override_the_environments() -> None:
    backend = NotedBackend()
    config = load_config(SandboxConfig, overrides=["limits.memory=1.5g", "limits.network=true"])
    sandbox_manager = SandboxManager(config, backend)
    requested = SandboxSpec(limits=SandboxLimits(memory=1, pids=7))
    assert (await sandbox_manager.open(requested)).spec.limits == replace(
        requested.limits, memory=3 * 2**29, network=True
    )
    await sandbox_manager.close()
    with pytest.raises(ConfigError, match="'lots' is not a size"):
        load_config(SandboxConfig, overrides=["limits.memory=lots"])


def test_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'doker' is not registered; did you mean 'docker'"):
        open_backend(SandboxConfig(name="doker"))
    with pytest.raises(ConfigError, match="not a SandboxBackend"):
        open_backend(SandboxConfig(name="turnwise.tasks:Task"))
    with pytest.raises(ConfigError, match=r"sandbox\.config of 'local'"):
        open_backend(SandboxConfig(config={"images": ["a"]}))


class _TwoSandboxes(Env):
    fails = False

    async def reset(self, task=None, *, seed=None):  # type: ignore[no-untyped-def]
        await self.open_sandbox()
        await self.open_sandbox()
        if self.fails:
            raise ValueError("no")
        return "go", {}


@pytest.mark.parametrize("wrapped", [False, True])
async def test_sandboxes_of_an_episode_are_closed_with_it(wrapped: bool) -> None:
    backend = NotedBackend()
    sandbox_manager = open_manager(backend)
    inner = _TwoSandboxes()
    env = wrap(inner, "turn_limit", max_turns=3) if wrapped else inner
    env.sandboxes = sandbox_manager
    await reset_env(env)
    assert env.sandbox is not None
    assert env.sandbox.id == "noted-1"
    assert len(backend.alive) == 2
    await reset_env(env)
    assert env.sandbox.id == "noted-3"
    assert backend.alive == {"noted-3", "noted-4"}
    await inner.close_sandbox(env.sandbox)
    assert backend.alive == {"noted-4"}
    assert env.sandbox is None
    inner.fails = True
    with pytest.raises(EnvError):
        await reset_env(env)
    await close_env(env)
    assert backend.alive == set()
    assert not backend.closed, "the manager is the runner's"
    await sandbox_manager.close()
