"""Recorded actions in other frameworks, and a program that plays them with a framework alone (its own interpreter).

``python foreign_plays.py FRAMEWORK`` prints JSON: for each environment the actions, the rewards they got, and the first
text that a player saw.
"""

from __future__ import annotations

import json
import random
import sys
import warnings

SEED = 7
FAMILIES = [
    *("ab", "acre", "aiw", "basic_arithmetic", "binary_alternation", "binary_matrix", "bitwise_arithmetic"),
    *("calendar_arithmetic", "chain_sum", "circuit_logic", "coin_flip", "color_cube_rotation", "complex_arithmetic"),
    *("count_bits", "course_schedule", "cryptarithm", "dice", "fraction_simplification", "gcd"),
    *("lcm", "maze", "mini_sudoku", "number_sorting", "palindrome_generation"),
]
GAMES = {
    "GuessTheNumber-v0": ["[3]", "[17]", "[10]", "[11]", "[12]", "[13]", "[14]", "[15]", "[16]", "[18]", "[9]"],
    "TowerOfHanoi-v0": ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"],
    "Mastermind-v0": ["[1 2 3 4]", "no code", "[2 3 4 5]", "[1 1 1 1]", "[1 1 1 1]"],
    "FrozenLake-v0": ["[right]", "[right]", "[down]", "[down]", "[down]", "[right]"],
    "Bandit-v0": ["[red]"] * 20 + ["[blue]"],
    "TicTacToe-v0": ["[0]", "[4]", "[1]", "[5]", "[2]"],
    "KuhnPoker-v0": ["[check]"] * 20,
}
GEM = {
    "game:GuessTheNumber-v0-easy": ["\\boxed{5}", "\\boxed{5}", "\\boxed{11}", "\\boxed{2}"],
    "game:Mastermind-v0-easy": ["\\boxed{12}", "\\boxed{1 2}", "\\boxed{3 4}", "\\boxed{5 6}", "nothing"],
    "game:FifteenPuzzle-v0-easy": ["\\boxed{up}", "\\boxed{left}", "\\boxed{down}", "\\boxed{right}"] * 3,
    "rg:chain_sum": ["\\boxed{12}"],
}


def reasoning_gym():
    import reasoning_gym as framework

    for name in FAMILIES:
        dataset = framework.create_dataset(name, seed=SEED, size=4)
        for index in range(4):
            entry = dataset[index]
            answer = [entry["answer"], "0", f"{entry['answer']} or so", None][index]
            text = "I do not know." if answer is None else f"So it is <answer>{answer}</answer>."
            yield f"{name}/{index}", [text], [dataset.score_answer(answer, entry)], entry["question"]


def textarena():
    import textarena as framework

    for name, actions in GAMES.items():
        players = 2 if name in ("TicTacToe-v0", "KuhnPoker-v0") else 1
        random.seed(SEED)
        env = framework.make(name)
        env.reset(num_players=players, seed=SEED)
        played, first = [], None
        for action in actions:
            _, text = env.get_observation()
            first = first or text
            played.append(action)
            done, _ = env.step(action=action)
            if done:
                break
        rewards, _ = env.close()
        yield name, played, [rewards[player] for player in sorted(rewards)], first


def gem():
    import gem as framework

    for name, actions in GEM.items():
        env = framework.make(name)
        first, _ = env.reset(seed=SEED)
        played, rewards = [], []
        for action in actions:
            _, reward, terminated, truncated, _ = env.step(action)
            played.append(action)
            rewards.append(float(reward))
            if terminated or truncated:
                break
        yield name, played, rewards, first


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    games = {"reasoning-gym": reasoning_gym, "textarena": textarena, "gem": gem}[sys.argv[1]]()
    plays = [
        {"name": name, "actions": acts, "rewards": rewards, "first": first} for name, acts, rewards, first in games
    ]
    sys.stdout.write(json.dumps(plays))
