"""prime-rl's reverse-text: a short warm start, then the ratio of what is right as the only reward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEMONSTRATIONS = 64


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return texts of two to four words and their reversals, as conversations in OpenAI's form."""
    from env import ReverseText, tasks

    from turnwise.envs.demonstrations import conversation

    return [
        await conversation(ReverseText(), task, number, lambda env: [env.task.data["answer"]])
        for number, task in enumerate(tasks(count, seed=1000 + seed, shortest=2, longest=4))
    ]


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "small_model"), str(HERE.parents[1] / "smollm2")]
    from pretrained import run_pretrained

    env = f"{HERE / 'env.py'}:ReverseText"
    return run_pretrained("reverse_text", HERE, demonstrations, DEMONSTRATIONS, __doc__, env=env)


if __name__ == "__main__":
    sys.exit(main())
