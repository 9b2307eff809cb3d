"""FrozenLake on maps that differ from episode to episode, played by text through the Gymnasium adapter.

A map has 16 fields, of which four in five are ice (Gymnasium's own generator); the lake is not slippery. An episode
ends at the goal, which pays 1, in a hole, or after ten moves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from turnwise.envs import StepResult
from turnwise.envs.core import ResetResult
from turnwise.envs.gym.from_gymnasium import GymnasiumEnv
from turnwise.errors import TaskError
from turnwise.tasks import Task
from turnwise.types import Message

SIZE = 4
MOVES = ("left", "down", "right", "up")
MOST_MOVES = 10
SPLITS = ("train", "test")
# Maps are drawn from a number below this one: an eighth of them are those of the held-out tasks.
MAPS = 1 << 24


class RandomLake(gymnasium.Wrapper[int, int, int, int]):
    """A lake that is drawn anew at each reset; ``options["split"]`` says whether from the held-out maps."""

    def __init__(self) -> None:
        super().__init__(lake(0))
        self.moves = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.env.close()
        split = (options or {}).get("split", "train")
        self.env = lake(map_number(random.Random(seed).randrange(MAPS), split))
        self.moves = 0
        return self.env.reset(seed=seed)

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.moves += 1
        return observation, float(reward), terminated, truncated or self.moves >= MOST_MOVES, info


class FrozenLake(GymnasiumEnv):
    """Names the state before each move, map and position, so that credit can compare moves from the same state."""

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = f"{__file__}:tasks"

    def __init__(self) -> None:
        super().__init__(RandomLake(), render=grid, actions=MOVES, instructions="Cross the lake.")

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        messages, info = super().reset(task, seed=seed)
        return messages, {**info, "state": self.world.text()}

    def step(self, action: Message) -> StepResult:
        result = super().step(action)
        return result._replace(info={**result.info, "state": self.world.text()})


def lake(number: int) -> FrozenLakeEnv:
    """Return the lake of a map's number."""
    return FrozenLakeEnv(desc=generate_random_map(size=SIZE, p=0.8, seed=number), is_slippery=False)


def map_number(number: int, split: str) -> int:
    """Return the number of a map of a split: the held-out ones are the multiples of eight."""
    if split not in SPLITS:
        raise TaskError(f"frozen_lake has no split {split!r}: {', '.join(SPLITS)}")
    return number - number % 8 if split == "test" else number | 1


def grid(observation: int, env: Any) -> str:
    """Return the map as lines: P where the player is, G the goal, O a hole, _ ice."""
    fields = [
        "".join("O" if cell == b"H" else "G" if cell == b"G" else "_" for cell in row) for row in env.unwrapped.desc
    ]
    row, column = divmod(int(observation), SIZE)
    fields[row] = f"{fields[row][:column]}P{fields[row][column + 1 :]}"
    return "\n".join(fields)


def tasks(n: int = 200, *, split: str = "train") -> Iterator[Task]:
    """Yield ``n`` lakes of a split, drawn when an episode resets."""
    map_number(0, split)
    for index in range(n):
        yield Task(f"lake-{split}-{index}", "Cross the lake.", {"options": {"split": split}})
