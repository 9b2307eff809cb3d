"""A loop of a user's own: it calls tools one by one, and steps only with its answer."""

from __future__ import annotations

from turnwise.agents.core import Agent, Episode
from turnwise.agents.registry import register_agent


@register_agent("test-plain-loop")
class PlainLoop(Agent):
    """Talks and calls tools by itself, one by one."""

    async def run(self, episode: Episode) -> None:
        messages = list(episode.observation)
        while True:
            message = await episode.session.chat(messages, episode.tools)
            messages.append(message)
            if not message.get("tool_calls"):
                await episode.step(message)
                return
            for call in message["tool_calls"]:
                response = await episode.call(call)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": response.content()})
