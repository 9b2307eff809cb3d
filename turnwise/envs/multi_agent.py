"""Environments that several agents share: one acts at a time, and each is told only what it may know.

What it says to whoever plays it stands in ``info``, so an environment written otherwise can say it too. ``reset``:
``agents`` (all names) and ``turn`` (who acts first), and ``tools`` (the names that each may call) where they differ.
``step``: ``turn`` (who acts next) and ``agent_rewards``. An observation is always for the one whose turn it is then.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from turnwise.envs.core import MaybeAwaitable, ResetResult, StepResult, invoke
from turnwise.envs.results import AgentRewards, Observation, ScoreParts, agent_parts, as_messages, finite
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, shown
from turnwise.tasks.core import Task
from turnwise.tools.response import ToolResponse
from turnwise.types import Message, ToolCall


class MultiAgentEnv(ToolEnv):
    """A world that several agents act in by turns. Write :meth:`begin`, :meth:`move` and :meth:`payoff`.

    A message with tool calls is answered, and its agent goes on; one without is its move.

    Attributes:
        agents: Their names, in any order; ``begin`` may set others. ``solver/0`` and ``solver/1`` are of one role.
        turn: Whose turn it is; None before the first episode and after the end of one. An episode that a limit ended
            is paid off with the name of the one whose turn it was.
    """

    agents: Sequence[str] = ()
    turn: str | None = None

    def begin(self, task: Task | None, seed: int | None) -> MaybeAwaitable[str]:
        """Set up an episode, :meth:`tell` the agents what they need, and return who acts first.

        Args:
            task: The dataset row, or None.
            seed: Decides everything that is random.
        """
        raise NotImplementedError

    def move(self, agent: str, message: Message) -> MaybeAwaitable[str | None]:
        """Take the message of an agent whose turn it is, and return who acts next: None where that was the end.

        Args:
            agent: Its name.
            message: What it said; no calls are in it.
        """
        raise NotImplementedError

    def payoff(self) -> MaybeAwaitable[AgentRewards]:
        """Return what the episode is worth to each agent: a number, or named parts. Runs exactly once per episode."""
        raise NotImplementedError

    def tools_of(self, agent: str) -> Collection[str] | None:  # noqa: ARG002 - for subclasses
        """Return the names of the tools that an agent may call; None is all of them."""
        return None

    def tell(self, agent: str, observation: Observation) -> None:
        """Say something to an agent, who reads it when it is its turn.

        Raises:
            EnvError: There is no such agent, or it is no observation.
        """
        self._known(agent, "tell")
        self._inbox.setdefault(agent, []).extend(as_messages(observation))

    def pay(self, agent: str, value: float, name: str = "step") -> None:
        """Reward an agent for what it did last.

        Raises:
            EnvError: There is no such agent, or it is no finite number.
        """
        self._known(agent, "pay")
        own = self._paid.setdefault(agent, {})
        own[name] = own.get(name, 0.0) + finite(value, f"{type(self).__qualname__}.pay({agent!r}):")

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Begin an episode with the one who acts first.

        Raises:
            EnvError: ``begin`` names nobody, or the one who acts first was told nothing.
        """
        self._inbox: dict[str, list[Message]] = {}
        self._paid: dict[str, dict[str, float]] = {}
        self.turn = None
        first = await invoke(self, "begin", task, seed)
        if first is None:
            raise EnvError(f"{type(self).__qualname__}.begin returned None: it must return who acts first")
        self._next(first, "begin")
        tools = {agent: self.tools_of(agent) for agent in self.agents}
        limited = {agent: sorted(names) for agent, names in tools.items() if names is not None}
        info: dict[str, Any] = {"agents": list(self.agents), "turn": self.turn}
        return self._heard(), info | ({"tools": limited} if limited else {})

    async def step(self, action: Message) -> StepResult:
        """Take a message of the one whose turn it is.

        Raises:
            EnvError: No episode runs, or a method broke its contract.
        """
        agent = self._acting()
        if action.get("tool_calls"):
            calls = [self._allowed(agent, call) for call in action["tool_calls"]]
            result = await super().step({**action, "tool_calls": calls})
            return result._replace(info={**result.info, "turn": agent})
        await self._open()
        self._next(await invoke(self, "move", agent, action), "move")
        if self.turn is None:
            return await self._end(agent, action)
        own, others = self._earned(agent)
        info = {"rewards": own, "agent_rewards": others, "turn": self.turn}
        return StepResult(self._heard(), sum(own.values()), False, False, info)

    async def call(self, call: ToolCall) -> ToolResponse:
        """Answer one call of the one whose turn it is."""
        return await super().call(self._allowed(self._acting(), call))

    async def score(self, final: Message | None) -> ScoreParts:  # noqa: ARG002 - ``payoff`` knows what was said
        """Return what :meth:`payoff` says, and what was paid since the last move: where a limit ends the episode, no
        step is left to say it.

        Raises:
            EnvError: It broke its contract, or names somebody who is no agent.
        """
        found = self.payoff()
        where = f"{type(self).__qualname__}.payoff returned"
        parts = agent_parts(await found if inspect.isawaitable(found) else found, "score", where)
        for agent, scores in parts.items():
            self._known(agent, "payoff")
            for part, value in scores.items():
                self.pay(agent, value, part)
        paid, self._paid = self._paid, {}
        return ScoreParts(agents=paid)

    async def _end(self, agent: str, action: Message) -> StepResult:
        self._over = True
        parts: ScoreParts = await invoke(self, "score", action)
        for name, scores in agent_parts(parts.agents, "score").items():
            for part, value in scores.items():
                self.pay(name, value, part)
        own, others = self._earned(agent)
        own |= parts
        info = {"rewards": own, "agent_rewards": others, "metrics": parts.metrics}
        return StepResult([], sum(own.values()), True, False, info)

    def _earned(self, agent: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Return what the one who acted was paid since the last step, and what the others were."""
        paid, self._paid = self._paid, {}
        return paid.pop(agent, {}), paid

    def _acting(self) -> str:
        if self.turn is None:
            raise EnvError(f"{type(self).__qualname__}: no episode runs: call reset() first")
        return self.turn

    def _next(self, turn: Any, method: str) -> None:
        if turn is not None:
            self._known(turn, method)
        self.turn = turn

    def _heard(self) -> list[Message]:
        agent = self._acting()
        heard = self._inbox.pop(agent, [])
        if not heard:
            raise EnvError(f"{type(self).__qualname__}: {agent!r} acts next, but was told nothing: use tell()")
        return heard

    def _known(self, agent: Any, method: str) -> None:
        if agent not in self.agents:
            known = ", ".join(self.agents) or "none: set `agents`"
            raise EnvError(f"{type(self).__qualname__}.{method} names {shown(agent)}, no agent; they are {known}")

    def _allowed(self, agent: str, call: ToolCall) -> ToolCall:
        """Return a call as it may be executed: one of a tool that another agent has is answered by an error."""
        names = self.tools_of(agent)
        if names is None or call.name in names or call.error is not None:
            return call
        return replace(call, error=f"{agent} has no tool {call.name!r}; it has {', '.join(sorted(names)) or 'none'}")
