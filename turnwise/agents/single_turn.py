"""One question, one answer: the agent of environments without tools."""

from __future__ import annotations

from typing import ClassVar

from turnwise.agents.core import Agent, Episode
from turnwise.types import StopReason


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
