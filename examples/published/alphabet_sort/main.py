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
    from job import Job, command_line, new_parser, train
    from pretrained import add_model_options, convert, details

    parser = new_parser(__doc__)
    add_model_options(parser)
    job = Job(
        "alphabet_sort",
        HERE,
        demonstrations,
        count=DEMONSTRATIONS,
        env=f"{HERE / 'env.py'}:AlphabetSort",
        pretrained=convert,
        smoke=("steps=1", "batch.groups=2", "rollout.group_size=2", "eval.limit=2", "eval.samples=1"),
        smoke_warm=("steps=1", "conversations=2"),
        details=details,
    )
    return train(job, command_line(job, parser).parse_intermixed_args())


if __name__ == "__main__":
    sys.exit(main())
