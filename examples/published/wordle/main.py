"""Wordle: a policy learns to read the marks of its guesses, and wins with words that it never had to guess."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "small_model")]
    from job import Job, run
    from teacher import demonstrations

    job = Job(
        "wordle",
        HERE,
        demonstrations,
        count=5760,
        width=64,
        layers=2,
        env=f"{HERE / 'env.py'}:Wordle",
        # A letter is a token, and so is a letter with its mark.
        words="[A-Z][GYX]|[A-Z]",
    )
    return run(job, __doc__)


if __name__ == "__main__":
    sys.exit(main())
