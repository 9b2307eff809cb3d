"""One agent makes up a sum, three solve it, each by itself: a shared world with roles that want different things."""

from __future__ import annotations

import random
import re

from turnwise.envs import MultiAgentEnv
from turnwise.types import text_of

SUM = re.compile(r"([0-9]{1,3}) ?\+ ?([0-9]{1,3})")


class ProposerSolver(MultiAgentEnv):
    """The proposer is paid for sums that some solvers get right and some do not, the solvers for being right."""

    score_range = (0.0, 1.0)
    default_tasks = "turnwise.tasks.seeded:tasks"

    def __init__(self, solvers: int = 3) -> None:
        self.solvers = tuple(f"solver/{number}" for number in range(solvers))
        self.agents = ("proposer", *self.solvers)

    def begin(self, task, seed):
        self.right: list[bool] = []
        self.answer: int | None = None
        # The same for all members of a group: what the proposer makes of it is what differs.
        self.example = "{} + {}".format(*random.Random(seed).choices(range(10), k=2))
        self.tell("proposer", f"Make up a sum like {self.example}")
        return "proposer"

    def move(self, agent, message):
        if agent == "proposer":
            proposal = SUM.fullmatch(text_of(message).strip())
            if proposal is None:
                return None
            self.answer = int(proposal[1]) + int(proposal[2])
            for solver in self.solvers:
                self.tell(solver, f"{proposal[1]} + {proposal[2]} =")
            return self.solvers[0]
        self.right.append(text_of(message).strip() == str(self.answer))
        return self.solvers[len(self.right)] if len(self.right) < len(self.solvers) else None

    def payoff(self):
        share = sum(self.right) / len(self.solvers)
        # Most for a sum that half of the solvers get right; none for one that all or none get right, or for no sum.
        paid = {solver: float(right) for solver, right in zip(self.solvers, self.right, strict=False)}
        return paid | {"proposer": {"difficulty": 1.0 - abs(2 * share - 1)}}
