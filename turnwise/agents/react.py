"""The ReAct loop: ask the model, run its calls, show it the answers, until the environment ends the episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.agents.context.config import ContextConfig, read_context
from turnwise.agents.context.sub_agent import EpisodeOver, Team
from turnwise.agents.core import Agent, Episode
from turnwise.types import StopReason


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
