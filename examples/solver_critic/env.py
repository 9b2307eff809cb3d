"""A solver adds two numbers, a critic judges the answer, and what the critic calls wrong is answered again."""

from __future__ import annotations

import random

from turnwise.envs import MultiAgentEnv
from turnwise.types import text_of


class SolverCritic(MultiAgentEnv):
    """The solver is paid for its last answer, the critic for a verdict that is true."""

    score_range = (0.0, 1.0)
    default_tasks = "turnwise.tasks.seeded:tasks"
    agents = ("solver", "critic")

    def begin(self, task, seed):
        self.a, self.b = random.Random(seed).choices(range(10), k=2)
        self.right: bool | None = None
        self.judged: bool | None = None
        self.tell("solver", f"{self.a} + {self.b} =")
        return "solver"

    def move(self, agent, message):
        text = text_of(message).strip()
        if agent == "solver":
            self.right = text == str(self.a + self.b)
            if self.judged is not None:
                return None
            self.tell("critic", f"{self.a} + {self.b} = {text[:4]}")
            return "critic"
        self.judged = text == ("right" if self.right else "wrong")
        if text != "wrong":
            return None
        self.tell("solver", "wrong, again:")
        return "solver"

    def payoff(self):
        return {"solver": float(bool(self.right)), "critic": float(bool(self.judged))}
