"""Two roles in one environment, for runs of seconds: a solver speaks, then a critic."""

from __future__ import annotations

from zlib import crc32

from turnwise.envs import MultiAgentEnv
from turnwise.types import text_of


class Pair(MultiAgentEnv):
    """Each role is paid by what it said alone, so that members of a group differ."""

    score_range = (0.0, 1.0)
    default_tasks = "turnwise.envs.library.seeded:tasks"
    agents = ("solver", "critic")

    def begin(self, task, seed):
        self.said: dict[str, float] = {}
        self.tell("solver", f"Say something about {seed % 10}.")
        return "solver"

    def move(self, agent, message):
        text = text_of(message)
        self.said[agent] = crc32(text.encode()) % 8 / 7
        if agent == "critic":
            return None
        self.tell("critic", f"What of this: {text[:40]}")
        return "critic"

    def payoff(self):
        return self.said
