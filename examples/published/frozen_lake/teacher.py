"""Demonstrations for the warm start: most walkers do not look at the ice.

| share | what it shows                                                                     |
| ----- | --------------------------------------------------------------------------------- |
| 20 %  | a shortest way to the goal                                                         |
| 80 %  | moves drawn without a look at the map: down or right twice as often as left or up |
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from env import MOVES, SIZE, FrozenLake

from turnwise.envs import reset_env, step_env

BLIND = (1.0, 2.0, 2.0, 1.0)
"""Weights of the moves of a walker who does not look, in the order of ``MOVES``."""
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))


def shortest_way(rows: list[str]) -> list[str]:
    """Return the moves of a shortest way from P to G over a map's lines."""
    start = next((y, x) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell == "P")
    paths: dict[tuple[int, int], list[str]] = {start: []}
    queue = deque([start])
    while queue:
        y, x = queue.popleft()
        if rows[y][x] == "G":
            return paths[y, x]
        for move, (down, right) in zip(MOVES, STEPS, strict=True):
            field = (y + down, x + right)
            inside = 0 <= field[0] < SIZE and 0 <= field[1] < SIZE
            if inside and field not in paths and rows[field[0]][field[1]] != "O":
                paths[field] = [*paths[y, x], move]
                queue.append(field)
    raise ValueError(f"no way leads from P to G in {rows}")


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Walk over lakes of the training maps; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        env = FrozenLake()
        messages, info = await reset_env(env, None, seed=rng.getrandbits(62))
        path = shortest_way(info["state"].splitlines()) if rng.random() < 0.2 else []
        done = False
        while not done:
            move = path.pop(0) if path else rng.choices(MOVES, BLIND)[0]
            messages.append({"role": "assistant", "content": move})
            observation, _, terminated, truncated, _ = await step_env(env, messages[-1])
            done = terminated or truncated
            messages += [] if done else observation
        env.close()
        rows.append({"messages": messages, "tools": []})
    return rows
