"""Agents of a run: made by name once for each configuration, with those of a file of further agents."""

from __future__ import annotations

import asyncio
import json
import logging

from turnwise.agents.core import Agent
from turnwise.agents.registry import find_agent, is_registered, make_agent, unknown_agent
from turnwise.agents.roles import MAIN
from turnwise.config import load_config
from turnwise.errors import AgentError, ConfigError, RegistryError
from turnwise.rollout.config import AgentEntry, AgentFile, RolloutConfig
from turnwise.rollout.core import CLOSE_TIMEOUT_S
from turnwise.tasks.core import Task
from turnwise.tools.cancellation import cancel

_log = logging.getLogger(__name__)


class AgentTable:
    """Agents of a run, made once for each configuration.

    Args:
        config: Names the run's agent and the file of further agents.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._default = config.agent
        self._policies = {MAIN, *config.frozen, *config.roles.values()}
        self._file = config.agent_loop_config_path
        self._further: dict[str, AgentEntry] = {}
        self._agents: dict[str, Agent] = {}
        entries: list[AgentEntry] = []
        if self._file is not None:
            try:
                entries = load_config(AgentFile, self._file, root="agents").agents
            except ConfigError as error:
                raise ConfigError(f"rollout.agent_loop_config_path {self._file}: {error}") from error
        for entry in entries:
            if entry.name in self._further:
                raise ConfigError(f"{self._file}: the agent name {entry.name!r} occurs twice")
            self._further[entry.name] = entry

    def default(self) -> Agent:
        """Return the run's default agent."""
        return self._agent(self._default.name, {})

    def of(self, task: Task) -> Agent:
        """Return the agent of a task."""
        return self._agent(task.agent or self._default.name, task.agent_config)

    def check(self) -> None:
        """Check that every agent of the file can be loaded; make none."""
        for name, entry in self._further.items():
            try:
                find_agent(entry.target)
            except (AgentError, ConfigError, RegistryError) as error:
                raise ConfigError(f"{self._file}: agent {name!r}: {error}") from error

    async def close(self) -> None:
        """Close the agents; one whose ``close`` swallows its cancellation is abandoned after its time-out."""
        closing = {asyncio.ensure_future(agent.close()): name for name, agent in self._agents.items()}
        done, pending = await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S) if closing else (set(), set())
        for task in pending:
            _log.warning("agent %s did not close within %g s: it is abandoned", closing[task], CLOSE_TIMEOUT_S)
            await cancel(task)
        for task in done:
            task.result()

    def _agent(self, name: str, arguments: dict[str, object]) -> Agent:
        key = f"{name} {json.dumps(arguments, sort_keys=True, default=repr)}" if arguments else name
        if key not in self._agents:
            agent = self._agents[key] = self._make(name, arguments)
            unknown = sorted(agent.policies() - self._policies)
            if unknown:
                del self._agents[key]
                raise ConfigError(
                    f"agent {name!r} names the policy {unknown[0]!r}, which does not exist: name one of "
                    f"{', '.join(sorted(self._policies))}, map a role to it in rollout.roles, or add "
                    f"rollout.frozen.{unknown[0]}"
                )
        return self._agents[key]

    def _make(self, name: str, arguments: dict[str, object]) -> Agent:
        entry = self._further.get(name)
        run = self._default.config if name == self._default.name else {}
        if entry is None:
            if self._further and not is_registered(name) and not any(mark in name for mark in ":./"):
                raise unknown_agent(name, self._further)
            return make_agent(name, **{**run, **arguments})
        try:
            return make_agent(entry.target, **{**entry.config, **run, **arguments})
        except (AgentError, ConfigError, RegistryError) as error:
            raise ConfigError(f"{self._file}: agent {name!r}: {error}") from error
