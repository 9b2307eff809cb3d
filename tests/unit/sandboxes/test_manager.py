"""The bookkeeping of sandboxes: bounds, retries, those started ahead, and that all of them are closed."""

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
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.sandboxes.manager._BACKOFF", 0.0)


def manager(backend: NotedBackend, **config: object) -> SandboxManager:
    return SandboxManager(SandboxConfig.model_validate(config), backend)


async def test_a_start_that_fails_is_tried_again_and_counted() -> None:
    backend = NotedBackend(failing={1, 2})
    held = manager(backend, start_retries=2)
    sandbox = await held.open()
    assert (sandbox.id, held.stats.retries, held.stats.opened, held.stats.failed) == ("noted-3", 2, 1, 0)
    await held.close()
    assert backend.alive == set()
    assert backend.closed


async def test_one_that_never_starts_says_why_and_one_that_cannot_is_not_tried_again() -> None:
    backend = NotedBackend(failing={1, 2, 3, 4})
    held = manager(backend, start_retries=2)
    with pytest.raises(SandboxStartError, match="did not start"):
        await held.open()
    assert (backend.made, held.stats.failed) == (3, 1)
    backend.error = SandboxUnavailable("no engine")
    with pytest.raises(SandboxUnavailable):
        await held.open()
    assert backend.made == 4


async def test_starts_are_bounded() -> None:
    backend = NotedBackend()
    backend.gate = asyncio.Event()
    held = manager(backend, max_starts=3)
    opening = [asyncio.create_task(held.open()) for _ in range(10)]
    await until(lambda: backend.starting == 3, "three start")
    backend.gate.set()
    await asyncio.gather(*opening)
    assert backend.most_starting == 3
    assert len(backend.alive) == 10
    assert backend.reaped == 1, "what dead hosts left is removed once"
    await held.close()
    assert backend.alive == set()


async def test_those_started_ahead_are_handed_out_and_those_of_another_kind_make_room() -> None:
    backend = NotedBackend()
    held = manager(backend, prewarm=2)
    await held.open()
    await until(lambda: len(backend.alive) == 3, "two ahead")
    taken = await held.open()
    assert held.stats.warm == 1
    assert taken.id in {"noted-2", "noted-3"}
    other = SandboxSpec(image="other")
    await held.open(other)
    await until(lambda: len(backend.alive) == 5 and len(held._warm) == 2, "two ahead of the other kind")
    assert held.stats.warm == 1
    assert (await held.open(other)).spec.image == "other"
    assert held.stats.warm == 2
    await held.close()
    assert backend.alive == set()


async def test_closing_ends_what_is_being_opened() -> None:
    backend = NotedBackend()
    backend.gate = asyncio.Event()
    held = manager(backend, prewarm=4)
    opening = asyncio.create_task(held.open())
    await until(lambda: backend.starting == 1, "one starts")
    closing = asyncio.create_task(held.close())
    await asyncio.sleep(0)
    backend.gate.set()
    await closing
    with pytest.raises(SandboxStartError, match="closed"):
        await opening
    assert backend.alive == set()


async def test_a_close_that_is_cancelled_goes_on_and_a_fork_of_a_closed_one_is_closed() -> None:
    backend = NotedBackend()
    held = manager(backend)
    first, second = await held.open(), await held.open()
    closing, go_on = first.close, asyncio.Event()

    async def slowly() -> None:
        await go_on.wait()
        await closing()

    first.close = slowly  # type: ignore[method-assign]
    releasing = asyncio.create_task(held.release(first))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert first.id in backend.alive
    backend.gate = asyncio.Event()
    forking = asyncio.create_task(held.fork(second))
    await until(lambda: backend.starting == 1, "a fork starts")
    ending = asyncio.create_task(held.close())
    await asyncio.sleep(0)
    go_on.set()
    await ending
    assert first.id not in backend.alive
    backend.gate.set()
    with pytest.raises(SandboxStartError, match="closed"):
        await forking
    assert backend.alive == set()


async def test_configured_limits_go_before_those_of_the_environment() -> None:
    backend = NotedBackend()
    config = load_config(SandboxConfig, overrides=["limits.memory=1.5g", "limits.network=true"])
    held = SandboxManager(config, backend)
    asked = SandboxSpec(limits=SandboxLimits(memory=1, pids=7))
    assert (await held.open(asked)).spec.limits == replace(asked.limits, memory=3 * 2**29, network=True)
    await held.close()
    with pytest.raises(ConfigError, match="'lots' is not a size"):
        load_config(SandboxConfig, overrides=["limits.memory=lots"])


def test_an_unknown_backend_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'doker'; did you mean 'docker'"):
        open_backend(SandboxConfig(name="doker"))
    with pytest.raises(ConfigError, match="not a SandboxBackend"):
        open_backend(SandboxConfig(name="turnwise.tasks:Task"))
    with pytest.raises(ConfigError, match=r"sandbox\.config of 'local'"):
        open_backend(SandboxConfig(config={"images": ["a"]}))


class _Boxed(Env):
    fails = False

    async def reset(self, task=None, *, seed=None):  # type: ignore[no-untyped-def]
        await self.open_sandbox()
        await self.open_sandbox()
        if self.fails:
            raise ValueError("no")
        return "go", {}


@pytest.mark.parametrize("wrapped", [False, True])
async def test_an_episode_s_sandboxes_end_with_it(wrapped: bool) -> None:
    backend = NotedBackend()
    held = manager(backend)
    inside = _Boxed()
    env = wrap(inside, "turn_limit", max_turns=3) if wrapped else inside
    env.sandboxes = held
    await reset_env(env)
    assert env.sandbox is not None
    assert env.sandbox.id == "noted-1"
    assert len(backend.alive) == 2
    await reset_env(env)
    assert env.sandbox.id == "noted-3"
    assert backend.alive == {"noted-3", "noted-4"}
    fork = await inside.fork_sandbox(env.sandbox)
    await inside.close_sandbox(env.sandbox)
    assert backend.alive == {"noted-4", fork.id}
    assert env.sandbox is None
    inside.fails = True
    with pytest.raises(EnvError):
        await reset_env(env)
    await close_env(env)
    assert backend.alive == set()
    assert not backend.closed, "the manager is the runner's"
    await held.close()
