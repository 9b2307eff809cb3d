"""Search-R1's loop: a policy learns to search a corpus, from nothing but whether its answer matches."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "small_model")]
    from env import KINDS, PEOPLE, TOWNS, WORKS
    from job import Job, run
    from teacher import demonstrations

    job = Job(
        "search",
        HERE,
        demonstrations,
        count=5120,
        width=64,
        layers=2,
        env=f"{HERE / 'env.py'}:SmallSearch",
        # Data, of which each word is a token of its own.
        words=rf"\b(?:{'|'.join([*PEOPLE, *TOWNS, *KINDS, *WORKS])})\b",
    )
    return run(job, __doc__)


if __name__ == "__main__":
    sys.exit(main())
