"""A model from nothing learns to calculate with a tool, one operation at a time, on a laptop's CPU in two minutes.

The steps are those of every job on a small model (``../small_model/job.py``): demonstrations of a teacher that is
mostly wrong (``teacher.py``), a warm start on them (``sft.yaml``), and reinforcement learning (``train.yaml``).
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, run
    from teacher import demonstrations

    return run(Job("calculator", HERE, demonstrations, count=11520), __doc__)


if __name__ == "__main__":
    sys.exit(main())
