"""Sandboxes, episodes and scripted agents for SWE tests, at the strongest isolation of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from turnwise.agents.core import Agent, Episode
from turnwise.envs.core import close_env, reset_env, score_env
from turnwise.errors import SandboxUnavailable
from turnwise.ext.environments.swe import SweEnv, tasks
from turnwise.ext.environments.swe.rows import instance_of
from turnwise.sandboxes import SandboxConfig, SandboxManager
from turnwise.tasks import Task
from turnwise.types import ToolCall


def task(name: str) -> Task:
    """A shipped row."""
    return next(row for row in tasks() if row.id == name)


@asynccontextmanager
async def any_manager(**settings: Any) -> AsyncIterator[SandboxManager]:
    """Sandboxes of this machine; without containment where it gives none (what runs in them is ours, and harmless)."""
    manager = SandboxManager(SandboxConfig(**settings))
    try:
        await manager.probe()
    except SandboxUnavailable:
        manager = SandboxManager(SandboxConfig(config={"isolation": "plain", "unsafe": True}))
    try:
        yield manager
    finally:
        await manager.close()


@asynccontextmanager
async def contained_manager(**settings: Any) -> AsyncIterator[SandboxManager]:
    """Sandboxes of this machine for what would harm it; a skip where it contains none."""
    manager = SandboxManager(SandboxConfig(**settings))
    try:
        try:
            await manager.probe()
        except SandboxUnavailable as error:
            pytest.skip(f"needs sandboxes that contain what runs in them: {error}")
        yield manager
    finally:
        await manager.close()


@asynccontextmanager
async def episode(manager: SandboxManager, row: Task, **config: Any) -> AsyncIterator[SweEnv]:
    """An environment that was reset with a row."""
    env = SweEnv(**config)
    env.sandboxes = manager
    try:
        await reset_env(env, row, seed=0)
        yield env
    finally:
        await close_env(env)


@asynccontextmanager
async def judging(manager: SandboxManager, row: Task, **config: Any) -> AsyncIterator[SweEnv]:
    """An environment that only judges: patches to a row, without an episode."""
    env = SweEnv(**config)
    env.sandboxes, env.instance = manager, instance_of(row)
    try:
        yield env
    finally:
        await close_env(env)


async def worth(manager: SandboxManager, row: Task, command: str, **config: Any) -> tuple[float, SweEnv]:
    """What a repository is worth after a command."""
    async with episode(manager, row, **config) as env:
        assert env.sandbox is not None
        done = await env.sandbox.exec(command, timeout=60.0)
        assert done.ok, done.text
        parts = await score_env(env, None)
        return sum(parts.values()), env


class Reference(Agent):
    async def run(self, episode: Episode) -> None:
        patch = episode.task.data["patch"].rstrip("\n")
        command = f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH"
        for call in (ToolCall("a", "shell", {"command": command}), ToolCall("b", "submit", {})):
            await episode.step({"role": "assistant", "content": "", "tool_calls": [call]})


class Idle(Agent):
    async def run(self, episode: Episode) -> None:
        await episode.step({"role": "assistant", "content": "Done."})
