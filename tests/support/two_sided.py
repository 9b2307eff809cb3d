"""An environment of two sides for training runs of seconds: whatever a barely trained model says is worth something."""

from __future__ import annotations

from turnwise.envs.multi_agent import MultiAgentEnv
from turnwise.seeding import stable_hash
from turnwise.types import text_of


class Exchange(MultiAgentEnv):
    """Two sides speak twice each; what was said is worth a number that hangs on every character of it."""

    agents = ("left", "right")

    def begin(self, task, seed):
        self.said: dict[str, list[str]] = {side: [] for side in self.agents}
        for side in self.agents:
            self.tell(side, f"You are {side}. {'' if task is None else task.prompt}")
        return "left"

    def move(self, agent, message):
        self.said[agent].append(text_of(message))
        other = "right" if agent == "left" else "left"
        if len(self.said["right"]) == 2:
            return None
        self.tell(other, f"They said {len(text_of(message))} characters.")
        return other

    def payoff(self):
        return {side: stable_hash(*said) % 1000 / 1000 for side, said in self.said.items()}
