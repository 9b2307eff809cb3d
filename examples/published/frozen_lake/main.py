"""GiGPO against GRPO on FrozenLake: credit for each move against one outcome for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "small_model")]
    from job import Job, run
    from teacher import demonstrations

    job = Job(
        "frozen_lake",
        HERE,
        demonstrations,
        count=3840,
        env=f"{HERE / 'env.py'}:FrozenLake",
        words="left|down|right|up|[P_OG]",
    )
    return run(job, __doc__)


if __name__ == "__main__":
    sys.exit(main())
