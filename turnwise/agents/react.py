"""The ReAct loop: ask the model, run its calls, show it the answers, until the environment ends the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.agents.context.config import ContextConfig, read_context
from turnwise.agents.context.sub_agent import EpisodeOver, Team
from turnwise.agents.core import Agent, Episode
from turnwise.agents.roles import TRAINED, check_name, role_of
from turnwise.envs.core import as_messages
from turnwise.errors import AgentError, shown
from turnwise.seeding import stable_hash
from turnwise.types import Message, StopReason, ToolSchema


class ReActAgent(Agent):
    """Alternates between the model and the environment.

    A message without calls is the final answer: the environment scores it. A message that a length limit cut
    before it made a call ends the episode with ``max_tokens``.

    Args:
        context: What it does about a conversation that outgrows the context: the fields of a ContextConfig
            (``drop_tool_results``, ``compaction``, ``sub_agent``).

    Raises:
        ConfigError: A key of ``context`` is unknown, or a value not allowed.
    """

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
    """Asks the model once, without tools; the environment scores what it says."""

    offers_tools: ClassVar[bool] = False

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        message = await episode.session.chat(episode.observation)
        if message["finish_reason"] == "length":
            episode.finish(StopReason.MAX_TOKENS, final=message)
            return
        await episode.step(message)


class TurnsAgent(Agent):
    """Alternates between the agents of an environment, as it says whose turn it is.

    Each reads only what it was told, and its own messages. An environment that names no agents has one, ``main``, who
    then plays as ReAct does. What ends one of them (a limit, a cut-off answer) ends the episode for all.
    """

    def __init__(self, policies: Mapping[str, str] | None = None, others: str | None = None) -> None:
        """Say who samples for whom.

        Args:
            policies: The policy of an agent or of a role (``solver`` also speaks for ``solver/0``): ``main``, which is
                trained, or one of ``rollout.frozen``. Who is not named is played by ``main``: with nobody named it
                plays against itself.
            others: Plays all agents but one. Which one is left to the trained policy is drawn from the task's seed,
                so it is the same one in all episodes of a group.

        Raises:
            AgentError: Both are given, or one is no name.
        """
        if others is not None and policies:
            raise AgentError("turns: policies and others are both given: name who plays whom, or who plays all but one")
        if policies is not None and not isinstance(policies, Mapping):
            raise AgentError(f"turns: policies is {shown(policies)}: it must be a dict from roles to policies")
        for policy in [*(policies or {}).values(), *([] if others is None else [others])]:
            if not isinstance(policy, str) or not policy:
                raise AgentError(f"turns: {shown(policy)} is no policy: name 'main' or one of rollout.frozen")
        self._policies = {check_name(agent): policy for agent, policy in (policies or {}).items()}
        self._others = others

    def policies(self) -> frozenset[str]:
        """The policies that play."""
        others = frozenset() if self._others is None else frozenset({self._others})
        return others | frozenset(self._policies.values()) | {TRAINED}

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        agents: Sequence[str] = episode.info.get("agents") or (TRAINED,)
        turn: str = episode.info.get("turn") or agents[0]
        # All at once: who never gets to speak has a trajectory, too, which holds its reward.
        policies = self._cast(agents, episode.seed)
        sessions = {name: episode.session_for(name, policies[name]) for name in agents}
        said: dict[str, list[Message]] = {name: [] for name in agents}
        heard = episode.observation
        while True:
            if turn not in sessions:
                raise AgentError(f"it is {turn!r}'s turn, none of those that reset named: {', '.join(agents)}")
            messages = said[turn]
            messages.extend(heard)
            message = await sessions[turn].chat(messages, _offered(episode, turn))
            if message["finish_reason"] == "length" and not message.get("tool_calls"):
                episode.finish(StopReason.MAX_TOKENS, final=message)
                return
            result = await episode.step(message, agent=turn)
            if result.terminated or result.truncated:
                return
            messages.append(message)
            heard = as_messages(result.observation)
            turn = result.info.get("turn") or turn

    def _cast(self, agents: Sequence[str], seed: int) -> dict[str, str]:
        """Return the policy of each agent."""
        if self._others is None:
            return {name: self._policies.get(name, self._policies.get(role_of(name), TRAINED)) for name in agents}
        trained = agents[stable_hash("cast", seed) % len(agents)]
        return {name: TRAINED if name == trained else self._others for name in agents}


def _offered(episode: Episode, agent: str) -> Sequence[ToolSchema]:
    """Return the tools that an agent may call."""
    names = episode.info.get("tools", {}).get(agent)
    return episode.tools if names is None else [tool for tool in episode.tools if tool.name in names]
