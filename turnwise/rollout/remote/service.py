"""The run's side of remote runners.

Owns: :class:`RemoteRunners`, which listens for runners and hands seats out, and :class:`RemoteAgent`, the agent of an
episode that a runner plays. Refuses: everything else about episodes; the run resets, limits, scores and closes them as
it does its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Self

from turnwise.agents.core import Agent, Episode
from turnwise.errors import AgentError, FormatError
from turnwise.inference.gateway.local import LocalGateway
from turnwise.inference.gateway.server import admin_key
from turnwise.rollout.config import RemoteConfig
from turnwise.rollout.remote.app import RunnerApp
from turnwise.rollout.remote.hub import Notify, Runner, RunnerHub
from turnwise.rollout.remote.protocol import PREFIX, read_error, read_message
from turnwise.types import StopReason


class RemoteRunners:
    """Listens for runners; made by :meth:`start`."""

    def __init__(self, hub: RunnerHub) -> None:
        self._hub = hub

    @classmethod
    async def start(cls, config: RemoteConfig, gateway: LocalGateway, notify: Notify | None) -> Self:
        """Listen, on the port of the gateway.

        Args:
            config: The key, and when a runner is given up.
            gateway: Where agents reach their sessions.
            notify: Told where to connect, who comes and goes, and that episodes wait.

        Raises:
            ConfigError: The key's file cannot be used.
            InferenceError: The port cannot be bound.
        """
        key = admin_key(config.key_file)
        hub = RunnerHub(lost_after=config.lost_after, notify=notify)
        await gateway.start()
        gateway.mount(PREFIX, RunnerApp(hub, key, own=gateway.url))
        if notify is not None:
            notify(f"runners: turnwise runner --connect {gateway.url} --key-file {config.key_file} --agent NAME")
        return cls(hub)

    @contextlib.asynccontextmanager
    async def seat(self) -> AsyncIterator[Agent]:
        """Wait for a runner with a free place; yield the agent that plays there."""
        async with self._hub.seat() as runner:
            yield RemoteAgent(self._hub, runner)

    async def close(self) -> None:
        """Tell the runners that the run has ended."""
        await self._hub.close()


class RemoteAgent(Agent):
    """Gives its episode to a runner and waits for what that says of it.

    Args:
        hub: Where runners connect.
        runner: Whose place it has.
    """

    def __init__(self, hub: RunnerHub, runner: Runner) -> None:
        self._hub = hub
        self._runner = runner

    async def run(self, episode: Episode) -> None:
        """Run one episode.

        Raises:
            RunnerLost: The runner has gone.
            TurnwiseError: What ended the agent there.
        """
        async with self._hub.lease(self._runner, episode, _work(episode)) as lease:
            said = await lease.done
            errors = lease.errors
        try:
            _apply(episode, said)
        except (FormatError, KeyError, TypeError, ValueError) as error:
            raise AgentError(f"runner {self._runner.name} sent a result that cannot be read: {error!r}") from error
        raised = said.get("raised")
        if raised is None:
            return
        known = raised.get("known")
        if isinstance(known, int) and 0 <= known < len(errors):
            raise errors[known]
        raise read_error(raised)


def _work(episode: Episode) -> dict[str, Any]:
    left = None if episode.deadline is None else episode.deadline - asyncio.get_running_loop().time()
    return {
        "id": episode.id,
        "partition": episode.partition,
        "attempt": episode.attempt,
        "task": episode.task.to_record(),
        "seed": episode.seed,
        "observation": episode.observation,
        "info": episode.info,
        "tools": [asdict(tool) for tool in episode.tools],
        "limits": asdict(episode.limits),
        "seconds": left,
    }


def _apply(episode: Episode, said: dict[str, Any]) -> None:
    """Note what the agent noted: rewards, metrics, and how it ended."""
    for agent, turn_id, name, value in said.get("rewards", ()):
        episode.note(str(name), float(value), turn_id, agent=str(agent))
    episode.rewarded = episode.rewarded or bool(said.get("rewarded"))
    for metrics, turn_id, agent in said.get("counted", ()):
        episode.count({str(name): float(value) for name, value in metrics.items()}, turn_id, agent=str(agent))
    finished = said.get("finished")
    # An episode that a step has ended keeps its end, whatever the agent says after it.
    if finished is not None and not episode.ended:
        final = finished.get("final")
        episode.finish(StopReason(finished["stop_reason"]), None if final is None else read_message(final))
