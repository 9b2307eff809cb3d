import random
from typing import Literal

import turnwise


class Dice(turnwise.ToolEnv):
    score_range = (0.0, 1.0)

    def reset(self, task=None, *, seed=None):
        self.dice = random.Random(seed).choices(range(1, 7), k=2)
        return "What do the two hidden dice add up to?", {}

    @turnwise.function_tool
    def look(self, die: Literal[1, 2]) -> int:
        """Look at one of the dice."""
        return self.dice[die - 1]

    def score(self, final):
        return float(final is not None and final["content"] == str(sum(self.dice)))

    def solve(self):
        yield [turnwise.tool_call("look", die=die) for die in (1, 2)]
        yield str(sum(self.dice))


if __name__ == "__main__":
    turnwise.main(Dice)
