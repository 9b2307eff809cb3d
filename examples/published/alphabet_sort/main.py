"""prime-rl's alphabet-sort: three turns, of which each adds names; what is in order is the only reward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEMONSTRATIONS = 64


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return solved tasks as conversations in OpenAI's form."""
    from env import AlphabetSort, tasks

    from turnwise.envs.demonstrations import solved_conversation

    return [
        await solved_conversation(AlphabetSort(), task, number)
        for number, task in enumerate(tasks(count, seed=1000 + seed))
    ]


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "small_model"), str(HERE.parents[1] / "smollm2")]
    from pretrained import run_pretrained

    env = f"{HERE / 'env.py'}:AlphabetSort"
    return run_pretrained("alphabet_sort", HERE, demonstrations, DEMONSTRATIONS, __doc__, env=env)


if __name__ == "__main__":
    sys.exit(main())
