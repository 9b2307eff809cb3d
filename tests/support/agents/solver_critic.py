"""An agent of two roles for runs of seconds: a solver and a critic, each paid for what it said."""

from __future__ import annotations

from zlib import crc32

from turnwise.agents.core import Agent, Episode


class SolverAndCritic(Agent):
    """Asks a session of each role once; rewards depend on the text alone, so that members of a group differ."""

    async def run(self, episode: Episode) -> None:
        for role in ("solver", "critic"):
            message = await episode.session_for(role).chat(episode.observation)
            lines = [message["content"] or "", *(call.raw for call in message.get("tool_calls") or ())]
            value = crc32(repr(lines).encode()) % 8 / 7
            episode.reward(value, message["turn_id"], agent=role)
