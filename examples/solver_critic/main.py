"""Two policies learn together: a solver that adds, and a critic that says whether it was right.

Each has its own model, optimizer, servers and checkpoint; ``rollout.roles`` in ``train.yaml`` says which role is played
by which. The steps are those of every job on a small model: demonstrations (half of the answers and of the verdicts
are wrong), a warm start on them (``sft.yaml``), from which both policies begin, and training.

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
    """Return conversations of both roles, with what a wrong first answer leads to."""
    rng = random.Random(seed)

    def said(*lines: str) -> dict[str, Any]:
        roles = ("user", "assistant") * len(lines)
        return {
            "messages": [{"role": role, "content": text} for role, text in zip(roles, lines, strict=False)],
            "tools": [],
        }

    def answer(total: int) -> str:
        return str(total if rng.random() < 0.5 else rng.randint(0, 18))

    rows = []
    for _ in range(count):
        a, b = rng.choices(range(10), k=2)
        first = answer(a + b)
        retry = ("wrong, again:", answer(a + b)) if rng.random() < 0.5 else ()
        rows.append(said(f"{a} + {b} =", first, *retry))
        rows.append(said(f"{a} + {b} = {first}", rng.choice(["right", "wrong"])))
    return rows


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, print_by_role, run

    job = Job(
        "solver-critic",
        HERE,
        demonstrations,
        count=6000,
        report=partial(print_by_role, ("solver", "critic")),
        policies=("solver", "critic"),
    )
    return run(job, __doc__)


if __name__ == "__main__":
    sys.exit(main())
