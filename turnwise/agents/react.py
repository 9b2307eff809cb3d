"""The ReAct loop: ask the model, run its calls, show it the answers, until the environment ends the episode."""

from __future__ import annotations

from turnwise.agents.core import Agent, Episode
from turnwise.envs.core import as_messages
from turnwise.types import StopReason


class ReActAgent(Agent):
    """Alternates between the model and the environment.

    A message without calls is the final answer: the environment scores it. A message that a length limit cut
    before it made a call ends the episode with ``max_tokens``.
    """

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        session = episode.session
        messages = list(episode.observation)
        while True:
            message = await session.chat(messages, episode.tools)
            if message["finish_reason"] == "length" and not message.get("tool_calls"):
                episode.finish(StopReason.MAX_TOKENS, final=message)
                return
            result = await episode.step(message)
            if result.terminated or result.truncated:
                return
            messages.append(message)
            messages.extend(as_messages(result.observation))
