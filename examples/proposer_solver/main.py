"""One policy learns two roles at once: to make up sums that are neither too easy nor too hard, and to solve them.

The steps are those of every job on a small model: demonstrations (half of the answers are wrong), a warm start on them
(``sft.yaml``), and training (``train.yaml``). ``env.py`` is the world that both roles share. To let another model
propose, name it in ``rollout.frozen`` and give it the role: see docs/agents.md.

``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return conversations of both roles."""
    rng = random.Random(seed)

    def said(question: str, answer: str) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "tools": [],
        }

    rows = []
    for _ in range(count):
        a, b = rng.choices(range(10), k=2)
        example = "{} + {}".format(*rng.choices(range(10), k=2))
        rows.append(said(f"Make up a sum like {example}", f"{a} + {b}"))
        rows += [said(f"{a} + {b} =", str(a + b if rng.random() < 0.5 else rng.randint(0, 18))) for _ in range(3)]
    return rows


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, print_by_role, run

    return run(
        Job("proposer-solver", HERE, demonstrations, count=2000, report=partial(print_by_role, ("proposer", "solver"))),
        __doc__,
    )


if __name__ == "__main__":
    sys.exit(main())
