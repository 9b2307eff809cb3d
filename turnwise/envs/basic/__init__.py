"""Small environments: two dependent tools, arithmetic, a guessing game, and tasks with a reward function."""
