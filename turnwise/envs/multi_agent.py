"""Multi-agent environments: agents act in turns, each with its own observations.

The protocol is in ``info``. ``reset``: ``agents`` (all names), ``turn`` (the agent that acts first), ``tools``
(allowed names by agent) where they differ. ``step``: ``turn`` (the agent that acts next) and ``agent_rewards``. An
observation is for the agent whose turn is next.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from turnwise.envs.core import MaybeAwaitable, ResetResult, StepResult, run_method, score_env
from turnwise.envs.results import AgentRewards, Observation, ScoreParts, agent_parts, as_messages
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, shown
from turnwise.tasks.core import Task
from turnwise.tools.response import ToolResponse, finite
from turnwise.types import Message, ToolCall


class MultiAgentEnv(ToolEnv):
    """Base class of turn-based environments. Write :meth:`begin`, :meth:`move` and :meth:`payoff`.

    A message with tool calls is answered, and its agent continues; one without is its move.

    Attributes:
        agents: Their names; ``begin`` may set others. ``solver/0`` and ``solver/1`` share a role.
        turn: The agent whose turn it is; None outside of an episode. After a limit it still names the last one.
    """

    agents: Sequence[str] = ()
    turn: str | None = None

    def begin(self, task: Task | None, seed: int | None) -> MaybeAwaitable[str]:
        """Set up an episode, :meth:`tell` the agents their observations, and return the first agent.

        Args:
            task: The dataset row, or None.
            seed: Seed of all randomness.
        """
        raise NotImplementedError

    def move(self, agent: str, message: Message) -> MaybeAwaitable[str | None]:
        """Apply a move and return the next agent, or None at the end.

        Args:
            agent: The acting agent.
            message: Its message, without calls.
        """
        raise NotImplementedError

    def payoff(self) -> MaybeAwaitable[AgentRewards]:
        """Return each agent's reward, a number or named parts. Called exactly once per episode."""
        raise NotImplementedError

    def tools_of(self, agent: str) -> Collection[str] | None:  # noqa: ARG002 - for subclasses
        """Return the names of an agent's tools; None is all."""
        return None

    def tell(self, agent: str, observation: Observation) -> None:
        """Queue an observation for an agent's next turn."""
        self._check_agent(agent, "tell")
        self._inbox.setdefault(agent, []).extend(as_messages(observation))

    def pay(self, agent: str, value: float, name: str = "step") -> None:
        """Reward an agent for its last action."""
        self._check_agent(agent, "pay")
        payments = self._paid.setdefault(agent, {})
        payments[name] = payments.get(name, 0.0) + finite(value, f"{type(self).__qualname__}.pay({agent!r}):")

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Begin an episode with the first agent's observation."""
        self._inbox: dict[str, list[Message]] = {}
        self._paid: dict[str, dict[str, float]] = {}
        self.turn = None
        first = await run_method(self, self.begin, task, seed)
        if first is None:
            raise EnvError(
                f"{type(self).__qualname__}.begin returned None: it must return the name of the agent that acts first"
            )
        self._set_turn(first, "begin")
        tools = {agent: self.tools_of(agent) for agent in self.agents}
        limited = {agent: sorted(names) for agent, names in tools.items() if names is not None}
        info: dict[str, Any] = {"agents": list(self.agents), "turn": self.turn}
        return self._take_observation(), info | ({"tools": limited} if limited else {})

    async def step(self, action: Message) -> StepResult:
        """Take a message of the current agent."""
        agent = self._current_agent()
        if action.get("tool_calls"):
            calls = [self._check_tool(agent, call) for call in action["tool_calls"]]
            result = await super().step({**action, "tool_calls": calls})
            return result._replace(info={**result.info, "turn": agent})
        await self._open()
        self._set_turn(await run_method(self, self.move, agent, action), "move")
        if self.turn is None:
            return await self._end_episode(agent, action)
        rewards, other_rewards = self._take_payments(agent)
        info = {"rewards": rewards, "agent_rewards": other_rewards, "turn": self.turn}
        return StepResult(self._take_observation(), sum(rewards.values()), False, False, info)

    async def call(self, call: ToolCall) -> ToolResponse:
        """Execute a call of the current agent."""
        return await super().call(self._check_tool(self._current_agent(), call))

    async def score(self, final: Message | None) -> ScoreParts:  # noqa: ARG002 - ``payoff`` knows what was said
        """Return :meth:`payoff` and the payments since the last move, which no step can report after a limit."""
        payoff = self.payoff()
        where = f"{type(self).__qualname__}.payoff returned"
        parts = agent_parts(await payoff if inspect.isawaitable(payoff) else payoff, "score", where)
        for agent, scores in parts.items():
            self._check_agent(agent, "payoff")
            for part, value in scores.items():
                self.pay(agent, value, part)
        paid, self._paid = self._paid, {}
        return ScoreParts(agents=paid)

    async def _end_episode(self, agent: str, action: Message) -> StepResult:
        self._over = True
        parts: ScoreParts = await score_env(self, action)
        for name, scores in agent_parts(parts.agents, "score").items():
            for part, value in scores.items():
                self.pay(name, value, part)
        rewards, other_rewards = self._take_payments(agent)
        rewards |= parts
        info = {"rewards": rewards, "agent_rewards": other_rewards, "metrics": parts.metrics}
        return StepResult([], sum(rewards.values()), True, False, info)

    def _take_payments(self, agent: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Return the payments since the last step, of the actor and of the others."""
        paid, self._paid = self._paid, {}
        return paid.pop(agent, {}), paid

    def _current_agent(self) -> str:
        if self.turn is None:
            raise EnvError(f"{type(self).__qualname__}: no episode runs: call reset() first")
        return self.turn

    def _set_turn(self, turn: Any, method: str) -> None:
        if turn is not None:
            self._check_agent(turn, method)
        self.turn = turn

    def _take_observation(self) -> list[Message]:
        agent = self._current_agent()
        messages = self._inbox.pop(agent, [])
        if not messages:
            raise EnvError(f"{type(self).__qualname__}: {agent!r} acts next, but has no observation: use tell()")
        return messages

    def _check_agent(self, agent: Any, method: str) -> None:
        if agent not in self.agents:
            names = ", ".join(self.agents) or "none: set `agents`"
            raise EnvError(
                f"{type(self).__qualname__}.{method} names {shown(agent)}, which is not one of the agents: {names}"
            )

    def _check_tool(self, agent: str, call: ToolCall) -> ToolCall:
        """Return a call as executed: another agent's tool is answered by an error."""
        names = self.tools_of(agent)
        if names is None or call.name in names or call.error is not None:
            return call
        return replace(call, error=f"{agent} has no tool {call.name!r}; it has {', '.join(sorted(names)) or 'none'}")
