"""The agents for chat models: the ReAct loop, a single turn, and turn-taking agents of one environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.agents.context.config import ContextConfig, read_context
from turnwise.agents.context.sub_agent import EpisodeOver, Team
from turnwise.agents.core import Agent, Episode
from turnwise.agents.roles import MAIN, check_name, role_of
from turnwise.envs.core import as_messages
from turnwise.errors import AgentError, shown
from turnwise.seeding import stable_hash
from turnwise.types import Message, StopReason, ToolSchema


class ReActAgent(Agent):
    """Alternates between model and environment.

    A message without calls is the final answer, which the environment scores. One cut by a length limit before any call
    ends the episode with ``max_tokens``.

    Args:
        context: Context limits: the fields of a ContextConfig (``drop_tool_results``, ``compaction``, ``sub_agent``).

    Raises:
        ConfigError: A key of ``context`` is unknown, or a value not allowed.
    """

    asks_by_chat: ClassVar[bool] = True

    def __init__(self, context: Mapping[str, Any] | ContextConfig | None = None) -> None:
        self._context = read_context(context)

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        team = Team(episode, self._context)
        talk = team.main()
        try:
            while True:
                message = await talk.ask()
                if message["finish_reason"] == "length" and not message.get("tool_calls"):
                    episode.finish(StopReason.MAX_TOKENS, final=message)
                    return
                talk.hear(await team.answer(talk, message))
        except EpisodeOver:
            return


class SingleTurnAgent(Agent):
    """Samples one answer, without tools, which the environment scores."""

    offers_tools: ClassVar[bool] = False
    asks_by_chat: ClassVar[bool] = True

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        message = await episode.session.chat(episode.observation)
        if message["finish_reason"] == "length":
            episode.finish(StopReason.MAX_TOKENS, final=message)
            return
        await episode.step(message)


class TurnsAgent(Agent):
    """Alternates between the agents of an environment, in the order that the environment sets.

    Each sees only its own observations and messages. An environment without agents has one, ``main``, which then plays
    as ReAct does. A limit or cut-off answer of one ends the episode for all.
    """

    asks_by_chat: ClassVar[bool] = True

    def __init__(self, policies: Mapping[str, str] | None = None, others: str | None = None) -> None:
        """Assign policies to agents.

        Args:
            policies: Policy of an agent or role (``solver`` includes ``solver/0``): a trained one, or one of
                ``rollout.frozen``. Others follow ``rollout.roles``; without any this is self-play of ``main``.
            others: Policy of all agents but one. The trained one is drawn from the task's seed, the same in all
                episodes of a group.

        Raises:
            AgentError: Both are given, or a name is invalid.
        """
        if others is not None and policies:
            raise AgentError("turns: policies and others are both given: keep one of them")
        if policies is not None and not isinstance(policies, Mapping):
            raise AgentError(f"turns: policies is {shown(policies)}: it must be a dict from roles to policies")
        for policy in [*(policies or {}).values(), *([] if others is None else [others])]:
            if not isinstance(policy, str) or not policy:
                raise AgentError(
                    f"turns: {shown(policy)} is not a policy: name one of policies (as 'main') or of rollout.frozen"
                )
        self._policies = {check_name(agent): policy for agent, policy in (policies or {}).items()}
        self._others = others

    def policies(self) -> frozenset[str]:
        """The policies that play."""
        untrained = frozenset() if self._others is None else frozenset({self._others})
        return untrained | frozenset(self._policies.values())

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        agents: Sequence[str] = episode.info.get("agents") or (MAIN,)
        turn: str = episode.info.get("turn") or agents[0]
        # All at once: an agent that never acts has a trajectory too, which holds its reward.
        policies = self._cast(agents, episode.seed)
        sessions = {name: episode.session_for(name, policies[name]) for name in agents}
        histories: dict[str, list[Message]] = {name: [] for name in agents}
        observation = episode.observation
        while True:
            if turn not in sessions:
                raise AgentError(f"it is {turn!r}'s turn, none of those that reset named: {', '.join(agents)}")
            messages = histories[turn]
            messages.extend(observation)
            message = await sessions[turn].chat(messages, _offered(episode, turn))
            if message["finish_reason"] == "length" and not message.get("tool_calls"):
                episode.finish(StopReason.MAX_TOKENS, final=message)
                return
            result = await episode.step(message, agent=turn)
            if result.terminated or result.truncated:
                return
            messages.append(message)
            observation = as_messages(result.observation)
            turn = result.info.get("turn") or turn

    def _cast(self, agents: Sequence[str], seed: int) -> dict[str, str | None]:
        if self._others is None:
            return {name: self._policies.get(name, self._policies.get(role_of(name))) for name in agents}
        trained = agents[stable_hash("cast", seed) % len(agents)]
        return {name: None if name == trained else self._others for name in agents}


def _offered(episode: Episode, agent: str) -> Sequence[ToolSchema]:
    names = episode.info.get("tools", {}).get(agent)
    return episode.tools if names is None else [tool for tool in episode.tools if tool.name in names]
